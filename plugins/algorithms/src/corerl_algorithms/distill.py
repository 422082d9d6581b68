"""On-policy distillation: a teacher says of each token that the student samples how likely it finds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from attrs import frozen

from corerl.algorithms import (
    ACTOR,
    ActorOnly,
    Advantages,
    AlgorithmRun,
    AlgorithmSpec,
    Clip,
    ForwardPass,
    Problem,
    RoleKind,
    broadcast,
)
from corerl.config import at_least, finite, option
from corerl.types import FloatArray, Output, SampleBatch

TEACHER = "teacher"
LOGPROBS = "teacher_logprobs"  # the column


@frozen(kw_only=True)
class Options(Clip):
    reward_coef: float = option(
        "weight of a sample's reward, which is added to the advantage of each of its tokens; 0 learns from the teacher "
        "alone",
        default=0.0,
        validator=[at_least(0), finite],
    )


class Distill(ActorOnly):
    """The actor, a student, samples; a token's advantage is how much likelier the teacher finds it than the student
    did, and PPO's clipped loss.

        A_t = log p(token_t) of the teacher - log p(token_t) of the student + reward_coef r

    The difference is the estimate by one sample of the reverse KL, KL(student || teacher), of this token's
    distribution, with the other sign. In the first optimizer step on a batch the expected gradient is that of this KL;
    in later ones A_t is still that of the student that sampled. A token is not credited with what follows it (a
    discount of 0), and no baseline is taken off. Both log-probs are at the sampling temperature.

    Agarwal et al. 2024, "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes" (GKD); Gu et
    al. 2024, "MiniLLM: Knowledge Distillation of Large Language Models", which credits what follows too; Thinking
    Machines 2025, "On-Policy Distillation", whose estimate this is.
    """

    options: Options

    def forwards(self) -> Sequence[ForwardPass]:
        return [ForwardPass(role=TEACHER, columns={LOGPROBS: Output.LOGPROBS})]

    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        mask = samples.columns["loss_mask"]
        difference = samples.columns[LOGPROBS] - samples.columns["old_logprobs"]
        learned = np.where(mask, difference, np.float32(0.0))
        earned = broadcast(np.float32(self.options.reward_coef) * rewards, samples)
        return Advantages(
            advantages=learned + earned,
            metrics={"teacher/reverse_kl": -float(learned[mask].mean())} if mask.any() else {},
        )


def check(options: Options, run: AlgorithmRun) -> Iterator[Problem]:
    if run.algorithm.kl_coef:
        yield Problem(
            ".algorithm.kl_coef",
            f"got {run.algorithm.kl_coef}, which holds the actor to the policy that it starts from, while this moves "
            "it to the teacher's by the same KL; set it to 0",
        )


SPEC = AlgorithmSpec(
    implementation="corerl_algorithms.distill:Distill",
    config=Options,
    api=(2, 0),
    summary="learns from a teacher's log-probs of what the actor samples (Agarwal et al. 2024)",
    by_prompt=True,
    roles={ACTOR: RoleKind.POLICY, TEACHER: RoleKind.FROZEN},
    compares=False,
    check=check,
)
