"""How many cores this process may use, and what of the machine nobody uses at this moment, as far as Linux tells."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def cores() -> int:
    """How many cores this process may use, within its container's CPU quota."""
    own = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except OSError:
        return own  # not in a container, or cgroups v1
    return own if quota == "max" else max(1, min(own, int(quota) // int(period)))


def idle_cores() -> int:
    """How many of these would be free if all threads that want to run now were on them; 0 where that is not known. In
    a container they are the whole machine's threads, so that it may be too few. Two threads of one core count as two,
    and with a quota that Linux does not tell here (cgroups v1) all of the machine's do: then it is too many."""
    try:
        running, _, _ = Path("/proc/loadavg").read_text().split()[3].partition("/")
    except OSError:
        return 0
    if int(running) < 1:  # this thread runs: some sandboxes tell none
        return 0
    return max(0, cores() - (int(running) - 1))  # without this thread, which reads


def computes(pid: int) -> bool:
    """Whether a thread of this process, or of one that comes of it, is on a core now or wants to be. True where that
    is not known, False if it has ended."""
    if not Path("/proc/self/stat").exists():
        return True
    children = list[str]()
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended
            if (thread / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"R":
                return True
            try:
                children += (thread / "children").read_text().split()
            except FileNotFoundError:  # of a kernel that tells no children, if the thread is there
                if thread.exists():
                    return True
    return any(computes(int(child)) for child in children)


def resident(pid: int) -> int:
    """Bytes of memory that a process has in use; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def free_memory() -> int:
    """Bytes that processes may still take; 0 where that is not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), 0)
