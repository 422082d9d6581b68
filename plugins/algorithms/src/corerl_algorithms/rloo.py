"""RLOO: a sample is compared with the others of its prompt. Ahmadian et al. 2024, "Back to Basics: Revisiting
REINFORCE-Style Optimization for Learning from Human Feedback in LLMs"."""

from __future__ import annotations

import numpy as np

from corerl.algorithms import (
    ActorOnly,
    Advantages,
    AlgorithmSpec,
    Clip,
    broadcast,
    compared,
    group_advantages,
    sample_rewards,
)
from corerl.types import Array, FloatArray, IntArray, SampleBatch


class RLOO(ActorOnly):
    """REINFORCE with the mean reward of the prompt's other samples as its baseline, at all tokens of a sample.

        A_t = r_i - 1/(G - 1) sum of r_j over the other samples j of the group

    Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024. The loss is
    PPO's clipped one. In the first optimizer step on a batch all ratios are 1, and its gradient is that of REINFORCE;
    the clip bounds later ones.
    """

    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        each = sample_rewards(samples, rewards, token_rewards)
        return Advantages(advantages=broadcast(compared(each, samples, left_one_out), samples))


def left_one_out(rewards: Array, groups: IntArray) -> FloatArray:
    """[B] rewards less the mean of the others in their group; 0 in a group of one. Both are [B], as in
    `group_advantages`.

    r_i - mean of the others = (r_i - mean of the group) G / (G - 1)
    """
    _, group_of, count = np.unique(groups, return_inverse=True, return_counts=True)
    scale = (count / np.maximum(count - 1, 1)).astype(np.float32)
    advantages: FloatArray = group_advantages(rewards, groups, normalize_std=False) * scale[group_of]
    return advantages


SPEC = AlgorithmSpec(
    implementation="corerl_algorithms.rloo:RLOO",
    config=Clip,
    api=(2, 0),
    summary="compares each sample with the others of its prompt (Ahmadian et al. 2024)",
    by_prompt=True,
)
