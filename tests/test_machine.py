"""Deadlines that grow with a machine's pace, and waiting for memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests import machine


def test_a_deadline_grows_with_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.PACE, "2.5")
    assert machine.paced(60.0) == 150.0


def test_memory_is_waited_for_and_named_if_it_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    free: Iterator[float] = itertools.chain([1.0, 1.5], itertools.repeat(3.0))
    slept: list[float] = []
    monkeypatch.setattr(machine, "available", lambda: next(free))
    monkeypatch.setattr(machine.time, "sleep", slept.append)
    machine.wait_for_memory(2.0, "a run")
    assert len(slept) == 2
    monkeypatch.setattr(machine, "LONGEST_WAIT", 0.0)
    with pytest.raises(AssertionError, match=r"^a run needs 4 GiB of memory, and only 3\.0 are free$"):
        machine.wait_for_memory(4.0, "a run")
