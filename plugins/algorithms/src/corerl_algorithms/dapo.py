"""DAPO, as settings of GRPO."""

from __future__ import annotations

from attrs import frozen

from corerl.algorithms import AlgorithmSpec, GRPOOptions
from corerl.config import at_least, option


@frozen(kw_only=True)
class Options(GRPOOptions):
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


SPEC = AlgorithmSpec(
    implementation="corerl.algorithms:GRPO",
    config=Options,
    api=(2, 0),
    summary="GRPO with a higher clip, dynamic sampling and a penalty for overlong samples (Yu et al. 2025)",
    by_prompt=True,
    # The paper samples until a batch is full. A bound ends a step whose prompts are all solved, or none.
    defaults={"aggregation": "token-mean", "dynamic_sampling": 10, "overlong": "penalty"},
)
