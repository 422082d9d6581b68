"""Groups without spread are replaced by those of other prompts, in steps on demand and one step off."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from corerl.algorithms.advantages import spread
from corerl.data.prompts import Prompt
from corerl.errors import RewardError
from corerl.rollout.ordered import OrderedRollouts
from corerl.rollout.rewards import Reward
from corerl.rollout.sampled import DynamicSampling
from corerl.rollout.scoring import Scorer
from tests.rollout.conftest import Use
from tests.rollout.engines import Engines, at_once
from tests.rollout.sampling import KINDS, ByIndex, source, stream, upcoming


def refilled(engines: Engines, attempts: int, reward: Scorer | Reward, **fields: Any) -> OrderedRollouts:
    dynamic_sampling = DynamicSampling(useful=spread, max_replacements=attempts)
    return source(engines, reward=at_once(reward), **{"prompts": 4, "dynamic_sampling": dynamic_sampling, **fields})


@pytest.mark.parametrize("kind", ["synchronous", "one-step-off"])
def test_groups_without_spread_are_replaced_by_later_prompts(kind: str, engines: Engines) -> None:
    begun, upcoming = refilled(engines, 20, ByIndex(), **KINDS[kind]), stream()
    for scored in engines.rest(begun):
        drawn = [prompt for _ in range(scored.counts["attempts"]) for prompt in upcoming.take(4)]
        odd = [prompt for prompt in drawn if prompt.index % 2]
        assert list(scored.rollout.prompts) == odd[:4]
        assert scored.counts == {
            "attempts": len(drawn) // 4,
            "groups_set_aside": len(drawn) - len(odd),
            "groups_unused": len(odd) - 4,
            "groups_missing": 0,
        }
        assert scored.rewards.tolist() == [0.0, 1.0] * 4
        assert scored.rollout.batch.row_columns["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert len(scored.rollout.texts) == len(scored.rollout.batch) == 8
        assert (scored.failures, scored.first_failure) == ({"raised": scored.counts["attempts"]}, "the first")


def by_parts(prompt: Prompt, response: str) -> dict[str, float]:
    """A length that differs, and an outcome that differs for prompts of odd numbers alone."""
    return {"right": float(prompt.index % 2 * (len(response) > 3)), "length": 0.1 * len(response)}


def test_a_part_of_the_reward_may_decide(engines: Engines) -> None:
    reward = Reward(name="parts", function=by_parts, weights={"right": 0.0, "length": 1.0})
    dynamic_sampling = DynamicSampling(useful=spread, max_replacements=40, part="right")
    scored = engines.next(refilled(engines, 0, reward, samples=6, dynamic_sampling=dynamic_sampling))
    assert scored.rewards.tolist() == pytest.approx([0.1 * len(text) for text in scored.rollout.texts])
    assert all(prompt.index % 2 for prompt in scored.rollout.prompts) and scored.counts["groups_missing"] == 0
    by_sum = engines.next(refilled(engines, 0, reward, samples=6, dynamic_sampling=evolve(dynamic_sampling, part="")))
    assert by_sum.counts["groups_set_aside"] < scored.counts["groups_set_aside"]

    wrong = DynamicSampling(useful=spread, max_replacements=1, part="rigth")
    with pytest.raises(RewardError, match=r"dynamic_sampling_on: 'rigth' .* 'right', 'length'; did you mean 'right'"):
        engines.next(refilled(engines, 0, reward, dynamic_sampling=wrong))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_that_only_some_prompts_have_may_decide(kind: str, use: Use[Engines]) -> None:
    """The last prompt of the first step alone has it, which is scored after the others where prompts come singly."""

    def reward(prompt: Prompt, response: str) -> dict[str, float]:
        return {"right" if prompt.index == upcoming(4)[-1] else "style": float(len(response))}

    dynamic_sampling = DynamicSampling(useful=spread, max_replacements=0, part="right")
    fields = {**KINDS[kind], "dynamic_sampling": dynamic_sampling, "steps": 3}
    engines = use(Engines(calls=1, width=2))
    begun, resumed = (refilled(engines, 0, Reward(name="parts", function=reward), **fields) for _ in range(2))
    resumed.dynamic_sampling = evolve(dynamic_sampling, known=True)  # as the checkpoint's run had it too
    with_right = [engines.next(begun).parts.keys() >= {"right"}]
    position = begun.position
    with_right += [each.parts.keys() >= {"right"} for each in engines.rest(begun)]
    assert with_right == [True, False, False]
    resumed.restore({name: position[name] for name in ("rollout_step", "prompts")})
    assert [each.step for each in engines.rest(resumed)] == [1, 2]
