"""CISPO: the ratio is a bounded weight, and no token loses its gradient. MiniMax 2025, "MiniMax-M1: Scaling Test-Time
Compute Efficiently with Lightning Attention"."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from corerl.algorithms import GRPO, AlgorithmSpec, GRPOOptions, LossInputs, LossResult, PolicyTokens
from corerl.config import at_least, between, option


@frozen(kw_only=True)
class Options(GRPOOptions):
    # The paper sets no lower bound, and does not tell its upper one. 5 is the usual largest weight since Khatri et al.
    # 2025, "The Art of Scaling Reinforcement Learning Compute for LLMs".
    clip_low: float = option(
        "the weight of a token is at least 1 - clip_low; 1 sets no bound", default=1.0, validator=between(0, 1)
    )
    clip_high: float = option("the weight of a token is at most 1 + clip_high", default=4.0, validator=at_least(0))


class CISPO(GRPO):
    """GRPO's advantages, and the loss `cispo`."""

    loss: ClassVar[str] = "corerl_algorithms.cispo:cispo"


def cispo(
    inputs: LossInputs,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
) -> LossResult:
    """REINFORCE with truncated importance weights, which are constants: sg stops the gradient.

        w_t    = clip(exp(logprobs_t - old_logprobs_t), 1 - clip_low, 1 + clip_high)                 eq. 5
        term_t = -sg(w_t) A_t logprobs_t                                                             eq. 4

    PPO's clip drops a token once its ratio has left the bounds, often those that are rare and decide how an answer
    goes on. Here it goes on learning with the weight at the bound. The common parameters, and what is read:
    `PolicyTokens`.

    Metrics besides the common ones: `clip_fraction`, of tokens whose weight is at a bound; they have a gradient.
    """
    tokens = PolicyTokens.of(inputs, name="cispo")
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    term = -weight * tokens.advantages * tokens.logprobs
    metrics = {"clip_fraction": weight != ratio}
    return tokens.result(term, metrics, entropy_coef=entropy_coef, kl_coef=kl_coef, kl_estimator=kl_estimator)


SPEC = AlgorithmSpec(
    implementation="corerl_algorithms.cispo:CISPO",
    config=Options,
    api=(2, 0),
    summary="GRPO whose clipped ratio is a weight, so that every token learns (MiniMax 2025)",
    by_prompt=True,
)
