"""GRPO: the samples of a prompt are compared with each other; DAPO and Dr. GRPO are GRPO with other settings."""

from __future__ import annotations

from functools import partial

from attrs import frozen

from corerl.algorithms.advantages import broadcast, compared, group_advantages, sample_rewards
from corerl.algorithms.base import ActorOnly, Advantages, Clip
from corerl.config.options import at_least, option
from corerl.plugin.spec import AlgorithmSpec
from corerl.types import FloatArray, SampleBatch


@frozen(kw_only=True)
class Options(Clip):
    normalize_std: bool = option("divide a group's centered rewards by their standard deviation", default=True)


class GRPO(ActorOnly):
    """The samples of a prompt are a group; a sample's tokens share its advantage, and PPO's clipped loss trains on it.

        A_t    = (r - mean(r of the group)) / std(r of the group)
        term_t = -min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)

    Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", eq. 3.
    """

    options: Options

    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        each = sample_rewards(samples, rewards, token_rewards)
        better = partial(group_advantages, normalize_std=self.options.normalize_std)
        return Advantages(advantages=broadcast(compared(each, samples, better), samples))


SPEC = AlgorithmSpec(
    implementation="corerl.algorithms.grpo:GRPO",
    config=Options,
    api=(2, 0),
    summary="compares the samples of a prompt (Shao et al. 2024)",
    by_prompt=True,
)


@frozen(kw_only=True)
class DAPOOptions(Options):
    """DAPO: GRPO with four changes, all of them settings. Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement
    Learning System at Scale".

        clip higher       clip_high = 0.28: a token may become likelier by more than it may become rarer (3.1)
        dynamic sampling  groups of equal rewards are dropped, and other prompts sampled in their place (3.2)
        token-level loss  aggregation = "token-mean": long samples count by their tokens (3.3, eq. 12)
        overlong penalty  samples near rollout.max_tokens lose up to 1 of their reward (3.4, eq. 13)

        A_t  = (r - mean(r of the group)) / std(r of the group)
        loss = sum of -min(ratio_t A_t, clip(ratio_t, 1 - 0.2, 1 + 0.28) A_t) over all tokens / their number    eq. 8
    """

    clip_high: float = option("the ratio is clipped above 1 + clip_high", default=0.28, validator=at_least(0))


DAPO_SPEC = AlgorithmSpec(
    implementation="corerl.algorithms.grpo:GRPO",
    config=DAPOOptions,
    api=(2, 0),
    summary="GRPO with a higher clip, dynamic sampling and a penalty for overlong samples (Yu et al. 2025)",
    by_prompt=True,
    # The paper samples until a batch is full. A bound ends a step whose prompts are all solved, or none.
    defaults={"aggregation": "token-mean", "dynamic_sampling": 10, "overlong": "penalty"},
)


@frozen(kw_only=True)
class DrGRPOOptions(Options):
    """Dr. GRPO: GRPO without its two biases. Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical
    Perspective".

        A_t  = r - mean(r of the group)
        loss = sum of PPO's clipped term over all tokens / (samples * rollout.max_tokens)

    Division by a group's standard deviation gives prompts that are nearly solved, or nearly never, more weight than
    others. Division by a sample's own length makes a wrong answer cost less the longer it is. The paper does neither
    (section 3.1).
    """

    normalize_std: bool = option("divide a group's centered rewards by their standard deviation", default=False)


DR_GRPO_SPEC = AlgorithmSpec(
    implementation="corerl.algorithms.grpo:GRPO",
    config=DrGRPOOptions,
    api=(2, 0),
    summary="GRPO without division by a group's spread or a sample's length (Liu et al. 2025)",
    by_prompt=True,
    defaults={"aggregation": "constant-length"},
)
