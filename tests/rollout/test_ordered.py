"""Rollout steps in order: sampled on demand or prompt by prompt, and what holds one step off too."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from corerl.data.prompts import Prompt
from corerl.engines.base import GenerateRequest, Generation
from corerl.errors import EngineFailed, RewardError
from corerl.rollout.ordered import OrderedRollouts
from corerl.rollout.rewards import Reward, position_match
from corerl.rollout.scoring import AsyncScorer, RewardScorer
from corerl.rollout.source import Arrived
from tests.rollout.conftest import Use
from tests.rollout.engines import LIMIT, Engines
from tests.rollout.sampling import KINDS, PROMPTS, REWARD, SAMPLES, assert_same, indices, source, stream


def in_caller(engines: Engines, reward: Reward = REWARD) -> AsyncScorer:
    """Scores in the thread that waits, as a synchronous run does."""
    return AsyncScorer(RewardScorer(reward), engines.fleet.loop.in_caller)


# ---- all of them -----------------------------------------------------------------------------------------------------


def test_steps_have_fresh_prompts_noise_and_their_rewards(engines: Engines) -> None:
    begun = source(engines, reward=in_caller(engines))
    steps = engines.rest(begun)
    assert [scored.step for scored in steps] == [0, 1, 2, 3]
    assert engines.rest(begun) == []  # as often as it is asked
    assert [index for scored in steps for index in indices(scored)] == [each.index for each in stream().take(12)]
    assert len(set(engines.keys)) == len(engines.keys) == 24
    for scored in steps:
        expected = [
            position_match(scored.rollout.prompts[row // 2], text) for row, text in enumerate(scored.rollout.texts)
        ]
        assert scored.rewards.tolist() == pytest.approx(expected)
        assert scored.exact_match == 0.0
        assert scored.seconds.keys() == {"rollout", "reward"}
        assert [shown.response for shown in scored.shown()] == scored.rollout.texts[::2]
        every = scored.samples()
        assert [each.response for each in every] == scored.rollout.texts
        assert [each.prompt for each in every[::2]] == [prompt.text for prompt in scored.rollout.prompts]
        assert [each.reward for each in every] == scored.rewards.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_source_continues_with_the_same_samples(kind: str, engines: Engines, tmp_path: Path) -> None:
    whole = source(engines, **KINDS[kind])
    for _ in range(2):
        engines.next(whole)
    position = whole.position
    whole.save(tmp_path)
    rest = engines.rest(whole)
    resumed = source(engines, **KINDS[kind])
    resumed.restore(position, tmp_path)
    assert resumed.position == position  # as it is saved again where a run has nothing left to train
    for found, wanted in zip(engines.rest(resumed), rest, strict=True):
        assert_same(found, wanted)


@pytest.mark.parametrize("kind", ["synchronous", "streamed"])
def test_dying_replicas_change_no_sample(kind: str, use: Use[Engines]) -> None:
    undisturbed = use(Engines(2))
    wanted = undisturbed.rest(source(undisturbed))
    for deaths, log in ((1, []), (2, ["receive", "replace 0", "replace 1"])):
        engines = use(Engines(2))
        begun = source(engines, **KINDS[kind])
        steps = [engines.next(begun)]
        engines.deaths = deaths
        steps += engines.rest(begun)
        assert sorted(engines.log) == log
        for found, expected in zip(steps, wanted, strict=True):
            assert_same(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_failed_rewards_end_a_step_only_if_all_failed(kind: str, use: Use[Engines]) -> None:
    def odd(prompt: Prompt, response: str) -> float:
        if prompt.index % 2:
            raise ValueError("odd")
        return 0.5

    engines = use(Engines())
    for step in engines.rest(
        source(engines, reward=Reward(name="odd", function=odd, failed_value=-1.0), **KINDS[kind])
    ):
        rows = [prompt.index % 2 for prompt in step.rollout.prompts for _ in range(SAMPLES)]
        assert step.rewards.tolist() == [-1.0 if row else 0.5 for row in rows]
        assert step.failures == ({"raised": sum(rows)} if any(rows) else {})
        prompt = next((prompt for prompt in step.rollout.prompts if prompt.index % 2), None)
        assert prompt is None or "raised ValueError: odd" in step.first_failure

    def never(prompt: Prompt, response: str) -> float:
        raise ValueError("out of luck")

    failing = source(engines, reward=Reward(name="never", function=never), **KINDS[kind])
    with pytest.raises(RewardError, match=r"^reward 'never' raised ValueError: out of luck .*; all 6 samples failed$"):
        engines.next(failing)
    assert failing.position["rollout_step"] == 0


def test_an_engines_error_is_raised_once_and_unchanged(use: Use[Engines]) -> None:
    engines = use(Engines(2))
    engines.failure = EngineFailed("engine-1 is broken")
    for _ in range(2):  # not that the engines have ended, which follows from it
        with pytest.raises(EngineFailed, match="^engine-1 is broken$"):
            engines.next(source(engines))


# ---- prompt by prompt ------------------------------------------------------------------------------------------------


class OneByOne(Engines):
    """A prompt's samples are generated once the test allows them."""

    def __init__(self) -> None:
        super().__init__(width=SAMPLES)
        self.allowed: set[int] = set()  # noise of first rows

    def draw(self, replica: int, request: GenerateRequest) -> Generation:
        with self.changing:
            key = int(request.noise_keys[0])
            self.changing.notify_all()  # it is asked for
            assert self.changing.wait_for(lambda: key in self.allowed or bool(self._ends), LIMIT)
        return super().draw(replica, request)

    def allow(self, keys: Sequence[int]) -> None:
        with self.changing:
            self.allowed |= set(keys)
            self.changing.notify_all()

    def wait_for(self, rows: int) -> list[int]:
        """Noise of as many rows, once they are asked for."""
        with self.changing:
            assert self.changing.wait_for(lambda: len(self.keys) >= rows, LIMIT)
            return self.keys[:rows]


def arrivals(engines: Engines, begun: OrderedRollouts) -> list[Arrived]:
    return list(iter(lambda: engines.run(begun.arrived()), None))


def test_a_prompt_is_handed_out_while_others_are_sampled(use: Use[OneByOne]) -> None:
    engines = use(OneByOne())
    progress: list[tuple[int, int]] = []
    begun = source(engines, singly=True, on_progress=lambda *counts: progress.append(counts))
    parts: list[Arrived | None] = []
    waiting = threading.Thread(target=lambda: parts.append(engines.run(begun.arrived())))
    waiting.start()
    keys = engines.wait_for(PROMPTS * SAMPLES)[::SAMPLES]
    assert parts == []
    engines.allow(keys[1:2])
    waiting.join(LIMIT)
    (first,) = parts
    assert first is not None and len(first.prompts) == 1
    engines.allow(keys)
    places = [place for part in [first, *arrivals(engines, begun)] for place in part.prompts]
    assert sorted(places) == list(range(PROMPTS))
    assert (
        engines.next(begun).rollout.batch.row_columns["group"].tolist() == np.repeat(range(PROMPTS), SAMPLES).tolist()
    )
    assert progress[0] == (0, PROMPTS * SAMPLES)
    begun.close()
