"""A process that ends with the one that started it, however that ends."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path


def end_with_parent(directory: Path) -> None:
    """Call it first in a process whose standard input is a pipe from its parent, and which leads a session of its own.
    `directory` is what the parent keeps for it, and is removed with it.

    A pipe closes when its last writer is gone, killed or not. (The kernel's own signal at a parent's death follows the
    thread that started the process, and a Ray actor's threads come and go.)
    """

    def wait() -> None:
        while os.read(0, 1):
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)  # with the ranks, which this process has started

    threading.Thread(target=wait, name="corerl-parent", daemon=True).start()
