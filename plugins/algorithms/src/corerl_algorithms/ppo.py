"""PPO with a critic. Schulman et al. 2017, "Proximal Policy Optimization Algorithms"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from corerl.algorithms import (
    ACTOR,
    Advantages,
    Algorithm,
    AlgorithmRun,
    AlgorithmSpec,
    Clip,
    ForwardPass,
    Objective,
    Problem,
    RoleKind,
)
from corerl.config import at_least, between, option
from corerl.types import FloatArray, LossSpec, Output, SampleBatch
from corerl_algorithms.estimates import at_last_token, explained_variance, gae, whiten

CRITIC = "critic"


@frozen(kw_only=True)
class Options(Clip):
    gamma: float = option("discount factor per token", default=1.0, validator=between(0, 1))
    gae_lambda: float = option(
        "lambda of generalized advantage estimation; 1 uses full returns, lower values trust the critic more",
        default=1.0,
        validator=between(0, 1),
    )
    whiten: bool = option(
        "normalize the advantages of a rollout batch to mean 0 and standard deviation 1", default=True
    )
    dual_clip: float = option(
        "bound of the ratio where the advantage is negative, such as 3 (Ye et al. 2020, eq. 5); 0: none",
        default=0.0,
        validator=at_least(0),
    )
    value_clip: float = option(
        "clip the change of a value from its value before the update to this much; 0 disables clipping",
        default=0.2,
        validator=at_least(0),
    )
    warmup_steps: int = option("initial rollout steps that train only the critic", default=0, validator=at_least(0))


class PPO(Algorithm):
    """Advantages of each token by generalized advantage estimation with a critic's values, PPO's clipped loss for the
    policy, and a squared error for the critic. A sample's reward is earned with its last token.

        delta_t = r_t + gamma V_t+1 - V_t
        A_t     = delta_t + gamma gae_lambda A_t+1, normalized over the batch with `whiten`; R_t = A_t + V_t before that
        actor   : term_t = -min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)
        critic  : term_t = 1/2 (v_t - R_t)^2, bounded by `value_clip`

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", eq. 7 and 9; Schulman et al. 2016,
    "High-Dimensional Continuous Control Using Generalized Advantage Estimation", eq. 16.
    """

    options: Options

    def forwards(self) -> Sequence[ForwardPass]:
        return [ForwardPass(role=CRITIC, columns={"values": Output.VALUES})]

    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        options, mask, values = self.options, samples.columns["loss_mask"], samples.columns["values"]
        earned = token_rewards + at_last_token(rewards, samples)
        advantages, returns = gae(earned, values, samples, gamma=options.gamma, lam=options.gae_lambda)
        return Advantages(
            advantages=whiten(advantages, mask) if options.whiten else advantages,
            columns={"returns": returns},
            metrics={"critic/explained_variance": explained_variance(values, returns, mask)},
        )

    def objectives(self) -> Mapping[str, Objective]:
        options = self.options
        clip = {"clip_low": options.clip_low, "clip_high": options.clip_high, "dual_clip": options.dual_clip}
        clip_values = {"value_clip": options.value_clip}
        return {
            ACTOR: Objective(loss=LossSpec(name="clipped", params=clip), trained_from=options.warmup_steps),
            # For values every token counts the same; how a policy's tokens are weighted is a choice.
            CRITIC: Objective(
                loss=LossSpec(name="value", params=clip_values, outputs=(Output.VALUES,)), aggregation="token-mean"
            ),
        }


def check(options: Options, run: AlgorithmRun) -> Iterator[Problem]:
    if 0 < run.steps <= options.warmup_steps:
        yield Problem(
            "warmup_steps",
            f"got {options.warmup_steps}, which leaves none of run.steps={run.steps} to train the actor; set it below "
            "run.steps",
        )
    if 0 < options.dual_clip <= 1:
        yield Problem("dual_clip", f"got {options.dual_clip}, which must be above 1; set it to 0 for none")


SPEC = AlgorithmSpec(
    implementation="corerl_algorithms.ppo:PPO",
    config=Options,
    api=(2, 0),
    summary="asks a critic what each token is worth (Schulman et al. 2017)",
    roles={ACTOR: RoleKind.POLICY, CRITIC: RoleKind.CRITIC},
    compares=False,
    credits_turns=True,
    check=check,
)
