"""Import what is large, such as torch and transformers, in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is looked for while the block lasts, and later collections pass over what is there at its end.

    Modules stay: to walk over their objects takes a fifth of the time that it takes to import torch and transformers,
    and, once they are imported, a third of a second whenever Python thinks it is time, on one rank while others wait.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
