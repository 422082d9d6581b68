"""How slow this machine is, and how much memory it has to spare: deadlines grow with the one, tests wait for the
other. And how a process on it ends itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PACE = "CORERL_TEST_PACE"
USUAL = 0.1  # seconds that starting a process and a little Python take at most, on two cores that are not busy
LONGEST_WAIT = 120.0  # seconds
FOREVER = 600.0  # seconds; longer than any test waits


def measure() -> float:
    """How many times longer than usual this machine takes for that, at least 1."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-I", "-c", "sum(range(2_000_000))"], check=True)
    return max(1.0, (time.perf_counter() - started) / USUAL)


def paced(seconds: float) -> float:
    """A deadline of `seconds` on the usual machine, on this one."""
    return seconds * float(os.environ.get(PACE, "1"))


def wait_for_memory(gib: float, what: str) -> None:
    """Return once that much memory is free, and fail if it does not become so."""
    deadline = time.monotonic() + paced(LONGEST_WAIT)
    while (free := available()) < gib:
        assert time.monotonic() < deadline, f"{what} needs {gib:g} GiB of memory, and only {free:.1f} are free"
        time.sleep(1.0)


def available() -> float:
    """GiB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kib) / 2**20


def die_of(number: signal.Signals) -> None:
    """Send this process a signal that kills or freezes it, and never return: the main thread takes the signal, and this
    one would go on until that happens."""
    os.kill(os.getpid(), number)
    time.sleep(FOREVER)
