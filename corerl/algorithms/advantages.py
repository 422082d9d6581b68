"""From one reward a sample to one advantage a token."""

from __future__ import annotations

import numpy as np

from corerl.types import Array, FloatArray, IntArray, SampleBatch

# Added to a group's standard deviation, as in TRL and verl: it only matters where the spread of the rewards is itself
# about this small, and keeps such a group from being blown up to unit advantages.
STD_EPS = 1e-6


def group_advantages(rewards: Array, groups: IntArray, *, normalize_std: bool) -> FloatArray:
    """[B] How much better each sample did than the mean of its group.

        A_i = (r_i - mean(r_group)) / (std(r_group) + 1e-6)        GRPO (Shao et al. 2024, "DeepSeekMath", eq. 3)
        A_i =  r_i - mean(r_group)                                 Dr.GRPO (Liu et al. 2025), normalize_std=False

    `std` is the sample standard deviation (divided by G - 1). A group of one sample, or whose rewards are all equal,
    says nothing about better or worse: its advantages are exactly 0.

        rewards: [B] finite, of any float type
        groups: [B] equal numbers mark the samples of one prompt; any numbers, in any order
    """
    _, group_of = np.unique(groups, return_inverse=True)
    exact = np.asarray(rewards, dtype=np.float64)
    count = np.bincount(group_of)
    centred = exact - (np.bincount(group_of, weights=exact) / count)[group_of]

    low = np.full(len(count), np.inf)
    high = np.full(len(count), -np.inf)
    np.minimum.at(low, group_of, exact)
    np.maximum.at(high, group_of, exact)
    # Rounding of the mean leaves 1e-17 behind where all rewards are equal; the answer there is 0, not almost 0.
    centred[(low == high)[group_of]] = 0.0

    if normalize_std:
        std = np.sqrt(np.bincount(group_of, weights=centred**2) / np.maximum(count - 1, 1))
        centred /= (std + STD_EPS)[group_of]
    return centred.astype(np.float32)


def broadcast(per_sample: FloatArray, batch: SampleBatch) -> FloatArray:
    """[N] The sample's number at each of its loss tokens, 0 elsewhere, from [B]."""
    per_token = np.repeat(np.asarray(per_sample, dtype=np.float32), batch.lengths)
    return np.where(batch.columns["loss_mask"], per_token, np.float32(0.0))
