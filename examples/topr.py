"""An algorithm outside CoreRL: what went well is learned, what went badly only as far as the policy still does it.

corerl train examples/quickstart.toml algorithm.name=examples.topr:SPEC algorithm.kl_coef=0
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from attrs import frozen

from corerl.algorithms import (
    ACTOR,
    Advantages,
    Algorithm,
    AlgorithmSpec,
    LossInputs,
    LossResult,
    Objective,
    PolicyTokens,
    broadcast,
    compared,
    group_advantages,
    sample_rewards,
)
from corerl.config import above, option
from corerl.types import FloatArray, LossSpec, SampleBatch


@frozen(kw_only=True)
class Options:
    taper: float = option("the largest weight of a token with a negative advantage", default=1.0, validator=above(0))


class TOPR(Algorithm):
    """A = r - mean(r of the group), and

        loss_t = -A_t log p_t                                    where A_t is positive
        loss_t = -A_t min(p_t / p_old,t, taper) log p_t          where it is negative, the ratio without gradient

    after Le Roux et al. 2025, "Tapered Off-Policy REINFORCE", whose ratio is that of the whole response.
    """

    options: Options

    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        each = sample_rewards(samples, rewards, token_rewards)
        better = compared(each, samples, partial(group_advantages, normalize_std=False))
        return Advantages(advantages=broadcast(better, samples))

    def objectives(self) -> Mapping[str, Objective]:
        return {ACTOR: Objective(loss=LossSpec(name="examples.topr:tapered", params={"taper": self.options.taper}))}


def tapered(inputs: LossInputs, *, taper: float, **common: Any) -> LossResult:
    tokens = PolicyTokens.of(inputs, name="tapered")
    ratio = tokens.log_ratio.detach().exp()
    negative = tokens.advantages < 0
    weight = ratio.clamp(max=taper).where(negative, 1.0)
    metrics = {"tapered_fraction": negative & (ratio > taper)}
    return tokens.result(-weight * tokens.advantages * tokens.logprobs, metrics, **common)


SPEC = AlgorithmSpec(
    implementation="examples.topr:TOPR",
    config=Options,
    api=(2, 0),
    summary="tapered off-policy REINFORCE (Le Roux et al. 2025)",
)
