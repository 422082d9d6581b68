"""GRPO: the samples of a prompt are compared with each other. Shao et al. 2024, "DeepSeekMath"."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from attrs import frozen

from corerl.algorithms.advantages import broadcast, compared, group_advantages, sample_rewards
from corerl.algorithms.base import Advantages, Algorithm, Objective
from corerl.config.options import at_least, between, option
from corerl.plugin.spec import ACTOR, AlgorithmSpec
from corerl.types import FloatArray, LossSpec, SampleBatch


@frozen(kw_only=True)
class Options:
    normalize_std: bool = option("divide a group's centered rewards by their standard deviation", default=True)
    clip_low: float = option("the ratio is clipped below 1 - clip_low", default=0.2, validator=between(0, 1))
    clip_high: float = option("the ratio is clipped above 1 + clip_high", default=0.2, validator=at_least(0))


class GRPO(Algorithm):
    """The samples of a prompt are a group; a sample's tokens share its advantage, and PPO's clipped loss trains on it.

        A_t    = (r - mean(r of the group)) / std(r of the group)
        term_t = -min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)

    Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", eq. 3.
    """

    options: Options
    loss: ClassVar[str] = "clipped"  # of parameters clip_low and clip_high

    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        each = sample_rewards(samples, rewards, token_rewards)
        better = partial(group_advantages, normalize_std=self.options.normalize_std)
        return Advantages(advantages=broadcast(compared(each, samples, better), samples))

    def objectives(self) -> Mapping[str, Objective]:
        clip = {"clip_low": self.options.clip_low, "clip_high": self.options.clip_high}
        return {ACTOR: Objective(loss=LossSpec(name=self.loss, params=clip))}


SPEC = AlgorithmSpec(
    implementation="corerl.algorithms.grpo:GRPO",
    config=Options,
    api=(2, 0),
    summary="compares the samples of a prompt (Shao et al. 2024)",
    by_prompt=True,
)
