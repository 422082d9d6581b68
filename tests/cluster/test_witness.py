"""What is said, by a process beside it, of a driver that has ended; with other processes in the place of Ray's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from corerl.cluster import witness
from tests.machine import paced

pytestmark = pytest.mark.processes


class Witnessed:
    """A witness of three processes."""

    def __init__(self) -> None:
        self.services = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
        handles = [os.pidfd_open(each.pid) for each in self.services]
        lines = [f"{handle}:line of {number}: it died" for number, handle in enumerate(handles)]
        self.process = subprocess.Popen(
            [sys.executable, "-IS", witness.__file__, *lines],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=handles,
        )
        for handle in handles:
            os.close(handle)
        deadline = time.monotonic() + paced(60.0)
        while self._registered() < 1 + len(handles):
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.01)

    def _registered(self) -> int:
        """How many descriptors it waits for."""
        count = 0
        for each in Path(f"/proc/{self.process.pid}/fdinfo").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it reads a file, which it has closed meanwhile
                count += sum(line.startswith("tfd:") for line in each.read_text().splitlines())
        return count

    def kill(self, *numbers: int) -> None:
        """All before it looks; returns once it has."""
        self.process.send_signal(signal.SIGSTOP)
        for number in numbers:
            self.services[number].kill()
            self.services[number].wait()
        self.process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + paced(60.0)
        while self._registered() > len(self.services):  # the driver is no longer among them
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.01)

    def told(self, last: bytes) -> bytes:
        """What is said, if these are the driver's last bytes."""
        return self.process.communicate(last, paced(60.0))[1]


@pytest.fixture
def witnessed() -> Iterator[Witnessed]:
    started = Witnessed()
    yield started
    for each in (started.process, *started.services):
        with contextlib.suppress(ProcessLookupError):
            each.kill()
        each.wait()


def test_a_driver_that_ends_without_a_word_after_a_death_is_spoken_for(witnessed: Witnessed) -> None:
    witnessed.kill(2, 1)  # one with the other, in whatever order
    assert witnessed.told(b"") == b"line of 1: it died\n"


def test_of_a_death_that_the_driver_tells_itself_nothing_is_said(witnessed: Witnessed) -> None:
    witnessed.kill(0)
    assert witnessed.told(b".") == b""


def test_nothing_is_said_of_what_ends_with_the_driver(witnessed: Witnessed) -> None:
    assert witnessed.told(b"") == b""  # it has ended, or was killed, while all were there
    assert witnessed.process.returncode == 0
