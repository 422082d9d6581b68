"""The key of one sample's noise: the same sample of a run draws the same tokens from the same weights, anywhere."""

from __future__ import annotations

from corerl.ops.noise import hash_keys
from corerl.types import IntArray


def noise_keys(seed: int, rollout_step: int, prompts: IntArray, samples: IntArray) -> IntArray:
    """[R] keys of samples [R] of prompts [R] (their indices in the data set) at one rollout step."""
    return hash_keys(seed, rollout_step, prompts, samples)
