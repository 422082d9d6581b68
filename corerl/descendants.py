"""Find the processes that others have started, where the system lists them in /proc."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path


def descendants(*pids: int) -> Sequence[int]:
    """The processes that these have started, and so on, that run now; parents come before their children."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int(file.read_bytes().rpartition(b")")[2].split()[1])
            children[parent].append(int(file.parent.name))
    found = list(pids)
    for pid in found:  # which grows
        found += children[pid]
    return found[len(pids) :]
