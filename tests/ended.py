"""Whether processes have ended."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

from tests.machine import paced


def alive(pid: int) -> bool:
    """Until its last thread has ended: so long what it had opened stays open."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z" or threads > 1


def gone(pids: Collection[int], *, within: float = 30.0) -> bool:
    """Whether all have ended so many seconds from now, of the usual machine."""
    end = time.monotonic() + paced(within)
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))
