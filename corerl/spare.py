"""How many cores this process may use."""

from __future__ import annotations

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
