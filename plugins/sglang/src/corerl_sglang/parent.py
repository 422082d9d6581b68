"""A process that ends with the one that started it, however that ends."""

from __future__ import annotations

import os
import signal
import threading


def end_with_parent() -> None:
    """Call it first in a process whose standard input is a pipe from its parent, and which leads a session of its own.

    A pipe closes when its last writer is gone, killed or not. (The kernel's own signal at a parent's death follows the
    thread that started the process, and a Ray actor's threads come and go.)
    """

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)  # with the ranks, which this process has started

    threading.Thread(target=wait, name="corerl-parent", daemon=True).start()
