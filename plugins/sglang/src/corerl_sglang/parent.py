"""What a server's process has of its parent: the arguments, and its end, however the parent ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.05


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


def read_arguments(file: Path) -> dict[str, Any]:
    """What the parent has written to `file`, once it has. A server is started before they are known, so as to import
    meanwhile what it needs."""
    while not file.exists():
        time.sleep(LOOK_SECONDS)
    told: dict[str, Any] = json.loads(file.read_text())
    return told
