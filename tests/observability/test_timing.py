from __future__ import annotations

import pytest

from corerl.observability.timing import Phases


class Ticks:
    """Every look at the clock is one second later than the last."""

    def __init__(self) -> None:
        self.now = -1.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_seconds_of_one_name_add_up_and_are_taken_once() -> None:
    phases = Phases(Ticks())
    with phases("rollout"):
        pass
    with phases("train"), phases("forward"):
        pass
    with phases("rollout"):
        pass
    assert phases.take() == {"rollout": 2.0, "forward": 1.0, "train": 2.0}  # without what is inside
    assert phases.take() == {}


def test_a_phase_that_raises_is_counted() -> None:
    phases = Phases(Ticks())
    with pytest.raises(KeyError), phases("reward"):
        raise KeyError("reward")
    assert phases.take() == {"reward": 1.0}
