"""Make a process end with its parent, however that ends."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path


def end_with_parent(directory: Path) -> None:
    """Call this first in a process whose standard input is a pipe from its parent and which leads its own session.
    `directory`, which the parent made for it, is removed at the end.

    A pipe closes when its last writer is gone, killed or not. (The kernel's parent-death signal is tied to the thread
    that started the process, and a Ray actor's threads come and go.)
    """

    def wait() -> None:
        while os.read(0, 1):
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)  # including the ranks, which this process started

    threading.Thread(target=wait, name="corerl-parent", daemon=True).start()
