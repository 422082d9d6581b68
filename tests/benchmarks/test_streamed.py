from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import streamed
from benchmarks.streamed import AHEAD, STREAMED, SYNCHRONOUS, InTurns, Killing, Sampled
from corerl.rollout.source import Source


def test_a_trainer_that_is_never_idle_ends_after_what_comes_last() -> None:
    # There after 1, 2 and 4 seconds, and a second of work each: the last one is begun when it comes.
    even = Sampled(longest=np.array([4, 1, 2]), tokens=np.array([10, 10, 10]))
    assert even.busy_until(rollout=4.0, train=3.0) == pytest.approx(5.0)
    # With four seconds of work each, it ends 12 s after the first has come.
    assert even.busy_until(rollout=4.0, train=12.0) == pytest.approx(13.0)
    # The longest has most tokens.
    skewed = Sampled(longest=np.array([1, 2, 4]), tokens=np.array([10, 10, 40]))
    assert skewed.busy_until(rollout=4.0, train=3.0) == pytest.approx(6.0)
    step = {"time/rollout": 4.0, "time/train": 2.0, "time/forward": 1.0, "time/step": 7.5}
    assert streamed.bounds(step, even) == pytest.approx((4.5, 5.5))


def test_steps_that_are_not_as_the_others_of_their_source_do_not_count() -> None:
    turns = [SYNCHRONOUS, STREAMED, SYNCHRONOUS, STREAMED, AHEAD, AHEAD, AHEAD, AHEAD]
    seconds = [50.0, 50.0, 10.0, 7.0, 50.0, 50.0, 6.0, 3.0]
    done = [
        {"time/step": each, "time/rollout": 6.0, "time/train": 3.0, "idle/ranks/total": 1.0, "rollout/reward": 0.5}
        for each in seconds
    ]
    sampled = [Sampled(longest=np.array([1, 2]), tokens=np.array([5, 5]))] * len(turns)
    args = argparse.Namespace(tiny=True, prompts=2, samples=2, new=4)
    report = streamed.sources_report(args, turns, done, sampled)
    assert [(each.what, each.ratios) for each in report.comparisons] == [
        ("step, streamed", [0.7]),
        ("step, one-step-off", [0.6]),
        ("bound of the step, max(R, T)", [0.7]),  # of 10 s, 6 are the rollout, and 1 is neither
        ("bound of the step, each prompt trained as it comes", [pytest.approx(0.85)]),
    ]
    told = {each.what: list(each.values) for each in report.numbers}
    assert told["streamed: step"] == [7.0]
    assert told["one-step-off: idle/ranks/total"] == [1.0]
    assert told["synchronous: rollout/reward"] == [0.5]


class Stream:
    def __init__(self) -> None:
        self.position = 0


class Told(Source):
    """Says what it was asked, and takes a prompt for each step."""

    streams = overlaps = False

    def __init__(self, name: str, stream: Stream, heard: list[tuple[Any, ...]], *, streams: bool, overlaps: bool):
        self.name, self.stream, self.heard = name, stream, heard
        self.streams, self.overlaps = streams, overlaps

    async def next(self) -> Any:
        self.stream.position += 1
        return self.name

    @property
    def position(self) -> dict[str, Any]:
        return {}

    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        self.heard.append((self.name, position["rollout_step"], position["prompts"]))


def test_sources_take_turns_from_where_the_other_has_come() -> None:
    stream, heard = Stream(), list[tuple[Any, ...]]()
    sources = {
        SYNCHRONOUS: Told(SYNCHRONOUS, stream, heard, streams=False, overlaps=False),
        STREAMED: Told(STREAMED, stream, heard, streams=True, overlaps=False),
        AHEAD: Told(AHEAD, stream, heard, streams=False, overlaps=True),
    }
    turns = [SYNCHRONOUS, STREAMED, AHEAD, AHEAD]
    both = InTurns(turns, sources, stream)  # type: ignore[arg-type]
    seen = []
    for _ in range(5):
        streams = both.streams
        assert asyncio.run(both.arrived()) is None
        seen.append((asyncio.run(both.next()), streams, both.overlaps))  # an update follows each step
    assert seen == [
        (SYNCHRONOUS, False, False),
        (STREAMED, True, False),
        (AHEAD, False, True),
        (AHEAD, False, True),
        (None, False, True),
    ]
    assert heard == [(SYNCHRONOUS, 0, 0), (STREAMED, 1, 1), (AHEAD, 2, 2)]


class Run:
    def __init__(self) -> None:
        self.done = 0

    def lines(self) -> list[dict[str, float]]:
        return [{"time/step": 1.0}] * self.done


def test_a_rank_is_killed_once_and_steps_that_are_done_again_are_told_from_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killing, run = Killing(tmp_path / "die", 3), Run()
    now = 100.0
    monkeypatch.setattr("benchmarks.streamed.time.monotonic", lambda: now)

    def look(done: int) -> bool:
        run.done = done
        return killing(run)  # type: ignore[arg-type]

    assert not look(2) and not killing.told.exists()
    assert not look(3) and killing.told.exists()
    killing.told.rename(tmp_path / "die.told")  # as the rank does
    (tmp_path / "die.died").write_text("90.0")
    assert not look(3) and not killing.told.exists()
    assert not look(2)  # from the checkpoint of step 2
    assert not look(3)
    now = 120.0
    assert look(4)
    assert killing.seconds() == (10.0, 30.0)
