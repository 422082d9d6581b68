"""Compute per-token advantages from rewards; penalize or mask samples that are cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from corerl.types import Array, BoolArray, FloatArray, IntArray, SampleBatch

# Added to a standard deviation, as in TRL and verl: it only matters if that is about this small itself, and keeps
# rounding errors from being blown up to unit advantages.
STD_EPS = 1e-6
# Rewards that differ by no more are equal: what sums of floats leave, of the larger of the two, and where parts cancel.
ROUNDING, RESIDUE = 1e-6, 1e-8


def differ(low: Array, high: Array) -> Any:
    """Whether numbers between `low` and `high` differ by more than rounding. `std` of thousandths of a float32's step
    would blow that up to advantages of 1."""
    return high - low > RESIDUE + ROUNDING * np.maximum(np.abs(low), np.abs(high))


def _differing(rewards: Array, group_of: IntArray) -> BoolArray:
    """[G] whether the rewards of each group differ."""
    low = np.full(group_of.max(initial=-1) + 1, np.inf)
    high = -low
    np.minimum.at(low, group_of, rewards)
    np.maximum.at(high, group_of, rewards)
    found: BoolArray = differ(low, high)
    return found


def group_advantages(rewards: Array, groups: IntArray, *, normalize_std: bool) -> FloatArray:
    """[B] advantages: how much better each sample did than the mean of its group.

        A_i = (r_i - mean(r_group)) / (std(r_group) + 1e-6)        GRPO (Shao et al. 2024, "DeepSeekMath", eq. 3)
        A_i =  r_i - mean(r_group)                                 Dr.GRPO (Liu et al. 2025), normalize_std=False

    `std` is the sample standard deviation (divided by G - 1). A group of one sample, or of rewards that are equal
    within rounding, says nothing about better or worse: its advantages are exactly 0.

        rewards: [B] finite, of any float type
        groups: [B] group numbers, equal for samples of one prompt; any numbers, in any order

    Where a sample may be several rows, pass one of each, `SampleBatch.episodes`, as `compared` does.
    """
    _, group_of = np.unique(groups, return_inverse=True)
    exact = np.asarray(rewards, dtype=np.float64)
    count = np.bincount(group_of)
    centred = exact - (np.bincount(group_of, weights=exact) / count)[group_of]
    # If all rewards are equal, rounding of the mean leaves about 1e-17; the answer is exactly 0.
    centred[~_differing(exact, group_of)[group_of]] = 0.0
    if normalize_std:
        std = np.sqrt(np.bincount(group_of, weights=centred**2) / np.maximum(count - 1, 1))
        centred /= (std + STD_EPS)[group_of]
    return centred.astype(np.float32)


def sample_rewards(samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> FloatArray:
    """[B] each sample's reward and the sum of its tokens' own, of all tokens of its episode; these are [B] and [N]."""
    if not token_rewards.any():  # as without a KL penalty: the sums take several times the memory of a column
        return rewards
    return rewards + of_episodes(token_rewards, samples)


def of_episodes(token_rewards: FloatArray, samples: SampleBatch) -> FloatArray:
    """[B] the sum over all tokens [N] of each sample's episode."""
    episodes, episode_of = samples.episodes
    sums = np.bincount(episode_of[samples.row_of], weights=token_rewards, minlength=len(episodes))
    return sums.astype(np.float32)[episode_of]


def compared(
    each: FloatArray, samples: SampleBatch, compare: Callable[[FloatArray, IntArray], FloatArray]
) -> FloatArray:
    """[B] what `compare` makes of rewards [E] and groups [E], in which every episode is counted once; `each` [B] is the
    reward of each sample."""
    episodes, episode_of = samples.episodes
    return compare(each[episodes], samples.row_columns["group"][episodes])[episode_of]


def broadcast(per_sample: FloatArray, batch: SampleBatch) -> FloatArray:
    """[N] each sample's number from [B] at all of its loss tokens, 0 elsewhere."""
    per_token = np.repeat(np.asarray(per_sample, dtype=np.float32), batch.lengths)
    return np.where(batch.columns["loss_mask"], per_token, np.float32(0.0))


def spread(rewards: FloatArray, groups: IntArray) -> BoolArray:
    """[G] whether the rewards of each group differ by more than rounding; rewards and groups are [B], groups are
    numbered 0..G-1.

    If they do not, every advantage of the group is 0 and it teaches nothing. Dynamic sampling takes another group in
    its place (Yu et al. 2025, "DAPO", section 3.2).
    """
    return _differing(np.asarray(rewards, dtype=np.float64), groups)


# ---- samples at the maximum length -----------------------------------------------------------------------------------


# Columns that SampleBatch promises to be 0 at tokens that the policy did not choose or should not learn.
CHOSEN = (
    "loss_mask",
    "rollout_logprobs",
    "versions",
    "engines",
    "old_logprobs",
    "ref_logprobs",
    "advantages",
    "values",
    "returns",
)


def soft_overlong_penalty(lengths: IntArray, *, max_tokens: int, buffer: int) -> FloatArray:
    """[B] what to add to the reward of a response of each length: it falls from 0 to -1 in the last `buffer` tokens.

        0                                          length <= max_tokens - buffer
        (max_tokens - buffer - length) / buffer    up to max_tokens
        -1                                         beyond

    Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", eq. 13.

        lengths: [B] sampled tokens of each response, without its prompt and without the results of tools
        buffer: tokens, in 0..max_tokens; 0 leaves only the -1 beyond max_tokens
    """
    # Lengths are integers: with a buffer of 0, the first one beyond max_tokens already gets -1.
    return np.clip((max_tokens - buffer - lengths) / max(buffer, 1), -1.0, 0.0).astype(np.float32)


def without_truncated(batch: SampleBatch) -> SampleBatch:
    """The batch without loss tokens in the samples whose row `truncated` is set.

    Overlong filtering: a sound answer is not punished for being cut off (Yu et al. 2025, "DAPO", section 3.4).
    The samples stay in the batch; their columns that are 0 outside loss tokens become 0 everywhere.
    """
    cut = np.repeat(np.asarray(batch.row_columns["truncated"], dtype=np.bool_), batch.lengths)
    found = {name: batch.columns[name] for name in CHOSEN if name in batch.columns}
    return batch.with_columns(**{name: np.where(cut, column.dtype.type(0), column) for name, column in found.items()})
