"""REINFORCE++: no critic, and rewards are compared over the whole batch. Hu 2025, "REINFORCE++: A Simple and Efficient
Approach for Aligning Large Language Models"."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from corerl.algorithms import (
    ActorOnly,
    Advantages,
    AlgorithmRun,
    AlgorithmSpec,
    Clip,
    Problem,
    broadcast,
    compared,
    group_advantages,
    sample_rewards,
)
from corerl.types import FloatArray, SampleBatch
from corerl_algorithms.estimates import at_last_token, gae, whiten


class ReinforcePlusPlus(ActorOnly):
    """A token's advantage is what is earned from there on, normalized over all loss tokens of the batch; PPO's clipped
    loss.

        R_t = r - kl_coef sum of KL_s over s >= t       the penalty with algorithm.kl_in = "reward", as in the paper
        A_t = (R_t - mean(R)) / std(R)

    Hu 2025, "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models".
    """

    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        earned = token_rewards + at_last_token(rewards, samples)
        returns, _ = gae(earned, np.zeros_like(earned), samples, gamma=1.0, lam=1.0)
        return Advantages(advantages=whiten(returns, samples.columns["loss_mask"]))


class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """The same for several samples of a prompt: rewards less the mean of their group, at all tokens of a sample, then
    normalized over all loss tokens of the batch instead of within the group.

        A'_t = r - mean(r of the group)
        A_t  = (A'_t - mean(A')) / std(A')

    The paper adds a KL penalty to the loss: algorithm.kl_coef.
    """

    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        each = sample_rewards(samples, rewards, token_rewards)
        better = compared(each, samples, partial(group_advantages, normalize_std=False))
        return Advantages(advantages=whiten(broadcast(better, samples), samples.columns["loss_mask"]))


def check(options: Clip, run: AlgorithmRun) -> Iterator[Problem]:
    """Of the variant with a baseline."""
    if run.rollout.samples < 2:
        yield Problem(
            ".rollout.samples",
            "1 leaves nothing of a reward less its group's mean; use at least 2, or algorithm.name='reinforce++'",
        )


SPEC = AlgorithmSpec(
    implementation="corerl_algorithms.reinforce_plus_plus:ReinforcePlusPlus",
    config=Clip,
    api=(2, 0),
    summary="compares rewards over the whole batch, for any number of samples per prompt (Hu 2025)",
    compares=False,
    credits_turns=True,
)
BASELINE_SPEC = AlgorithmSpec(
    implementation="corerl_algorithms.reinforce_plus_plus:ReinforcePlusPlusBaseline",
    config=Clip,
    api=(2, 0),
    summary="compares the samples of a prompt, and normalizes over the whole batch (Hu 2025)",
    # A group of equal rewards is at 0 only until the batch's mean over tokens is taken off.
    compares=False,
    check=check,
)
