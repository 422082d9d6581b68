"""Real processes, which compute, wait, or have others that do."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corerl import spare
from tests.machine import paced

LOOP, SLEEP = "while True: pass", "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {LOOP!r}])"


def seen(pid: int, computes: bool) -> bool:
    deadline = time.monotonic() + paced(20.0)  # until it has started
    while time.monotonic() < deadline:
        if spare.computes(pid) is computes and Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/"):
            time.sleep(0.3)
            if spare.computes(pid) is computes:
                return True
        time.sleep(0.05)
    return False


@pytest.mark.processes
@pytest.mark.parametrize(("code", "computes"), [(LOOP, True), (SLEEP, False), (PARENT, True)])
def test_a_process_computes_if_it_or_one_of_its_own_does(code: str, computes: bool) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True) as process:
        found = seen(process.pid, computes)
        os.killpg(process.pid, 9)
    assert found
    assert not spare.computes(process.pid)


def test_cores_are_idle_that_no_thread_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare, "cores", lambda: 8)
    told = iter(
        ["0.5 0.4 0.3 1/900 1234\n", "9.5 7.4 4.3 4/900 1234\n", "9.5 7.4 4.3 12/900 1234\n", "0.0 0.0 0.0 0/0 0\n"]
    )
    monkeypatch.setattr(Path, "read_text", lambda path: next(told))
    assert [spare.idle_cores() for _ in range(4)] == [8, 5, 0, 0]  # one of those that run is this thread


def test_memory_is_told_in_bytes() -> None:
    assert 2**20 < spare.resident(os.getpid()) < spare.free_memory() < 2**50
    assert spare.resident(2**30) == 0
