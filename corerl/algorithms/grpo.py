"""GRPO: the samples of a prompt are compared with each other."""

from __future__ import annotations

from functools import partial

from attrs import frozen

from corerl.algorithms.advantages import broadcast, compared, group_advantages, sample_rewards
from corerl.algorithms.base import ActorOnly, Advantages, Clip
from corerl.config.options import option
from corerl.plugin.spec import AlgorithmSpec
from corerl.types import FloatArray, SampleBatch


@frozen(kw_only=True)
class GRPOOptions(Clip):
    """Options of algorithms with GRPO's advantages."""

    normalize_std: bool = option("divide a group's centered rewards by their standard deviation", default=True)


class GRPO(ActorOnly):
    """The samples of a prompt are a group; a sample's tokens share its advantage, and PPO's clipped loss trains on it.

        A_t    = (r - mean(r of the group)) / std(r of the group)
        term_t = -min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)

    Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", eq. 3.
    """

    options: GRPOOptions

    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        each = sample_rewards(samples, rewards, token_rewards)
        better = partial(group_advantages, normalize_std=self.options.normalize_std)
        return Advantages(advantages=broadcast(compared(each, samples, better), samples))


SPEC = AlgorithmSpec(
    implementation="corerl.algorithms.grpo:GRPO",
    config=GRPOOptions,
    api=(2, 0),
    summary="compares the samples of a prompt (Shao et al. 2024)",
    by_prompt=True,
)
