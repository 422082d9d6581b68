"""How a run's parts that sample are put together."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from corerl.config.schema import RewardConfig, RolloutConfig
from corerl.driver import sampling as driver
from corerl.driver.sampling import Sampling, rows_of_a_call
from corerl.engines.base import UNLIMITED
from corerl.rollout.sampler import Sampler


@pytest.mark.parametrize(
    ("source", "replicas", "calls", "rows"),
    [
        ("asynchronous", 2, 4, 8 * 4),  # an even share of a batch: 64 prompts over 8 calls
        ("asynchronous", 3, 1, 21 * 4),
        ("asynchronous", 100, 1, 4),  # never less than a group
        ("streamed", 2, 1, 8 * 4),  # a quarter of an engine's share, one call after the other
        ("streamed", 2, 16, 2 * 4),  # a sixteenth: all calls at once hold it
        ("streamed", 2, 30, 2 * 4),  # 16 of them hold it; with less in each, 30 would not
        ("streamed", 2, 128, 4),
        ("synchronous", 2, 4, UNLIMITED),
        ("one-step-off", 2, 4, UNLIMITED),
    ],
)
def test_a_call_gets_at_most_its_share_of_a_step(source: str, replicas: int, calls: int, rows: int) -> None:
    rollout = RolloutConfig(source=source, prompts=64, samples=4)  # type: ignore[arg-type]
    assert rows_of_a_call(rollout, replicas=replicas, calls=calls) == rows


class Asked(Sampler):
    """A sampler that only keeps how it was made, and whether it was closed."""

    closed = False

    async def generate(self, prompts: Any, request: Any, **_: Any) -> Any:
        raise AssertionError

    def close(self) -> None:
        self.closed = True


def planned(special_tokens: bool, *sets: bool) -> Any:
    rewarding = RewardConfig(special_tokens=special_tokens)
    own = [SimpleNamespace(rewarding=RewardConfig(special_tokens=kept), source=Mock()) for kept in sets]
    rollout = Mock(rewarding=rewarding, make_sampler=functools.partial(Asked, "options"), seed=5, context_length=64)
    run = Mock(trains=False, steps=3)
    processes = Mock(engine=Mock(calls=3), environment={"JUDGE_KEY": "of a service"})
    return Mock(rollout=rollout, eval_sets=own, processes=processes, run=run)


def sampling(plan: Any, fleet: Any, stack: contextlib.ExitStack) -> Sampling:
    return Sampling(
        plan=plan, fleet=fleet, loop=fleet.loop, rewards=(Mock(), [Mock()] * 3), progress=Mock(), stack=stack
    )


def test_a_set_whose_reward_reads_special_tokens_has_its_own_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "make_source", Mock())
    fleet = Mock()
    with contextlib.ExitStack() as stack:
        made = sampling(planned(False, False, True, True), fleet, stack)
        (_, same, _), (_, other, _), (_, again, _) = made.eval_sets
        first: Any = made.sampler
        assert same is first and other is again and other is not first
        assert [each.context.special_tokens for each in (first, other)] == [False, True]
        known = first.context
        assert first.options == "options" and known.generate is fleet.generate and known.loop is fleet.loop
        assert (known.seed, known.context_length, known.calls) == (5, 64, 3)
        assert known.environment == {"JUDGE_KEY": "of a service"}
        assert not first.closed
    assert first.closed and made.source.close.called  # type: ignore[attr-defined]
