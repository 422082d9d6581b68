"""The table of what all algorithms share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import evolve, frozen

from corerl.config.options import above, at_least, filled, finite, option

Aggregation = Literal["token-mean", "sequence-mean", "constant-length"]
KL_ESTIMATOR = {"loss": "k3", "reward": "k1"}  # that of algorithm.kl_in, where the config names none


@frozen(kw_only=True)
class AlgorithmConfig:
    """The settings that all algorithms share, from rewards to the policy's loss. One that is unset is as the algorithm
    says; `settled` fills it in."""

    name: str = option(
        "an installed algorithm (`corerl plugins` lists them), 'distribution:name', or 'package.module:SPEC'",
        default="grpo",
        validator=filled,
    )
    advantages: str = option(
        "'module:function' in place of the algorithm's own advantages",
        default="",
        needs="!rollout.source=streamed",
    )
    postprocess: str = option(
        "'module:function' that maps the samples of a step, with log-probs, values and advantages, to those that are "
        "trained on",
        default="",
        needs="!rollout.source=streamed",
    )
    loss: str = option("in place of the algorithm's own policy loss: clipped, or 'module:function'", default="")
    entropy_coef: float = option("weight of the entropy bonus", default=0.0, validator=[at_least(0), finite])
    kl_coef: float = option(
        "weight of the KL penalty to the reference policy; 0 keeps no reference policy",
        default=0.0,
        validator=[at_least(0), finite],
    )
    reference: str = option(
        "directory of the reference policy's weights, in the actor's architecture; empty: those that the actor starts "
        "from",
        default="",
        needs=("algorithm.kl_coef", "!roles.reference", "!lora"),
    )
    reference_every: int = option(
        "rollout steps between updates of the reference policy to the actor's current weights; 0: never",
        default=0,
        validator=at_least(0),
        needs=("algorithm.kl_coef", "!roles.reference"),
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3-differentiated"] | None = option(
        "estimator of the KL's value (Schulman 2020). In the loss, the gradient is that of the KL with each of them "
        "except k3-differentiated (Shao et al. 2024); in the reward, only with k1. Unset: k3 in the loss, k1 in the "
        "reward",
        default=None,
        needs={"k3-differentiated": "algorithm.kl_in=loss"},
    )
    kl_in: Literal["loss", "reward"] = option(
        "apply the KL penalty in the loss, or subtract it from each token's reward. normalize_std divides the penalty "
        "too: where a group's rewards are equal, kl_coef cancels",
        default="loss",
        # The KL of an engine's log-probs has its rounding, which is larger than a small KL; where a group's rewards are
        # equal, it would be all that advantages are made of.
        needs={"reward": ("algorithm.kl_coef", "algorithm.old_logprobs=recompute")},
    )
    aggregation: Aggregation | None = option(
        "how token losses are weighted in a step: all tokens equally, all sequences equally, or by 1 / "
        "rollout.max_tokens; unset: token-mean, unless the algorithm says otherwise",
        default=None,
    )
    old_logprobs: Literal["rollout", "recompute"] | None = option(
        "log-probs in the ratio's denominator: the engine's, or the trainer's recomputed before the first step; unset: "
        "recompute with kl_in='reward', else rollout, unless the algorithm says otherwise",
        default=None,
    )
    correction: Literal["none", "token", "sequence", "geometric"] = option(
        "importance weights that correct for the mismatch of engine and trainer log-probs: the ratio of probabilities "
        "of each token, their product over a sample, or their geometric mean over it (Yao et al. 2025; Liu et al. "
        "2025)",
        default="none",
        needs="algorithm.old_logprobs=recompute",
    )
    correction_floor: float = option(
        "the smallest importance weight, at most correction_cap",
        default=0.0,
        validator=[at_least(0), finite],
        needs="algorithm.correction",
    )
    correction_cap: float = option(
        "the largest importance weight",
        default=2.0,
        validator=above(0),
        needs="algorithm.correction",
    )
    correction_beyond: Literal["truncate", "mask"] = option(
        "ratios below correction_floor or above correction_cap; truncate: the weight is that bound; mask: it is 0,"
        " so that the token (Ling Team 2025, IcePop) or the sample (Liu et al. 2025) is not trained on",
        default="truncate",
        needs="algorithm.correction",
    )
    on_mismatch: Literal["stop", "warn", "off"] = option(
        "what to do if trainer and engines, with the same weights, give sampled tokens log-probs that differ by "
        "more than mismatch_bound; stop: end the run; warn: report it and continue; off: do not check. Checked "
        "before the first step, after the first update with new weights, and after every weights.verify_every-th "
        "one",
        default="stop",
    )
    mismatch_bound: float = option(
        "mean difference of log-probs above which trainer and engines disagree. 0 chooses by the coarser of "
        "train.precision and what weights are sent in: 0.01 in float32, 0.1 in bfloat16 and float16, 0.3 with "
        "weights.quantize='fp8'; measured are 1e-7 to 0.0013, 0.002 to 0.056 and 0.03 to 0.2, the highest with "
        "experts. An engine that quantizes by itself needs its own",
        default=0.0,
        validator=[at_least(0), finite],
    )
    routing_replay: Literal["none", "recompute", "engine"] = option(
        "for MoE models: the experts that each token is trained through; none: those its routers choose in the "
        "training pass; recompute: those chosen when old_logprobs were recomputed (R2); engine: those the engine "
        'chose while sampling (R3). Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and '
        'Inference Routers"; Zheng et al. 2025, "Stabilizing Reinforcement Learning with LLMs"',
        default="none",
        needs={"recompute": "algorithm.old_logprobs=recompute"},
    )
    dynamic_sampling: int | None = option(
        "maximum number of times that groups whose rewards are all equal are dropped and other prompts sampled "
        "instead (Yu et al. 2025, section 3.2); 0 keeps such groups; unset: 0, unless the algorithm says otherwise",
        default=None,
        validator=at_least(0),
        needs=("!run.mode=train-only", "!rollout.source=streamed", "!algorithm.kl_in=reward"),
    )
    dynamic_sampling_on: str = option(
        "the part of the reward by which dynamic_sampling takes a group's rewards for equal: the label of one of "
        "reward.functions, or a name under which the function returns a value, such as 'right'; empty: the reward "
        "itself, the sum of all parts",
        default="",
        needs="algorithm.dynamic_sampling",
    )
    overlong: Literal["keep", "mask", "penalty"] | None = option(
        "what to do with samples at or near rollout.max_tokens; keep: train on them unchanged; mask: leave out "
        "truncated ones; penalty: reduce the reward by up to 1 over the last overlong_buffer tokens (Yu et al. 2025, "
        "section 3.4); unset: keep, unless the algorithm says otherwise",
        default=None,
    )
    overlong_buffer: int | None = option(
        "tokens before rollout.max_tokens over which the penalty grows from 0 to 1; unset: a fifth of them with "
        "overlong='penalty', else 0",
        default=None,
        validator=at_least(0),
    )

    def settled(self, defaults: Mapping[str, Any], *, max_tokens: int) -> AlgorithmConfig:
        """The same with a value for every setting that is unset: of `defaults`, the algorithm's own, or the common one;
        the KL's estimator only where there is a KL. `max_tokens` is `rollout.max_tokens`."""
        common = {
            "aggregation": "token-mean",
            "dynamic_sampling": 0,
            "overlong": "keep",
            "old_logprobs": "recompute" if self.kl_in == "reward" else "rollout",
            "kl_estimator": KL_ESTIMATOR[self.kl_in] if self.kl_coef else None,
            **defaults,
        }
        settled = evolve(self, **{name: value for name, value in common.items() if getattr(self, name) is None})
        if settled.overlong_buffer is not None:
            return settled
        return evolve(settled, overlong_buffer=max(1, max_tokens // 5) if settled.overlong == "penalty" else 0)
