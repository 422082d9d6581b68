"""Tell the user once when nearly all groups of several steps in a row have equal rewards, which teach nothing."""

from __future__ import annotations

from collections import deque

import numpy as np

from corerl.algorithms.advantages import differ, spread
from corerl.config.schema import AlgorithmConfig
from corerl.types import FloatArray, IntArray

STEPS = 3  # in a row before the user is told
NEARLY_ALL = 0.9  # share of a step's groups


def without_spread(rewards: FloatArray, groups: IntArray) -> tuple[int, int]:
    """How many groups have equal rewards, and how many groups there are; rewards and group numbers are [B]. Numbers
    may be missing: a user's function may have dropped samples."""
    _, numbered = np.unique(groups, return_inverse=True)
    differ = spread(rewards, numbered)
    return int((~differ).sum()), len(differ)


class EqualRewards:
    """Hears the rewards of each step. Two cases are told apart: all samples have one reward, which the reward or the
    data may explain, and each group has a reward of its own."""

    def __init__(self, algorithm: AlgorithmConfig, *, compares: bool, samples: bool) -> None:
        """`compares` is whether groups of equal rewards teach nothing, `samples` whether the run samples, and so could
        sample other prompts."""
        self._compares = compares
        self._cure = "use prompts that this model answers right sometimes"
        if self._compares and samples:
            others = "set algorithm.dynamic_sampling, which samples other prompts in their place"
            if set_to := algorithm.dynamic_sampling:
                others = f"raise algorithm.dynamic_sampling={set_to}, the times that other prompts are sampled instead"
            self._cure = f"{others}, or {self._cure}"
        self._learned = "nothing but shorter answers is" if algorithm.overlong == "penalty" else "nothing is"
        self._constant = 0  # steps in a row in which all samples had one reward
        self._dull: deque[tuple[int, int]] = deque(maxlen=STEPS)  # of the steps in a row: equal groups, all groups
        self._told = False

    def update(self, rewards: FloatArray, groups: IntArray) -> str:
        """A notice about the latest steps, "" if there is none. The one about samples is due again once they have
        differed; the one about groups, whose share goes up and down, comes once."""
        equal_all = len(rewards) > 1 and not differ(rewards.min(), rewards.max())
        self._constant = self._constant + 1 if equal_all else 0
        equal, of = without_spread(rewards, groups)
        if self._compares and equal >= NEARLY_ALL * of:
            self._dull.append((equal, of))
        else:
            self._dull.clear()
        if self._constant == STEPS:
            return (
                f"all samples of a step had the same reward, {STEPS} steps in a row, now {rewards[0]:g}: "
                f"{self._learned} learned from that; check reward.name, data.answer_key and the samples; if these are "
                f"right, {self._cure}"
            )
        if self._constant or self._told or len(self._dull) < STEPS:
            return ""
        self._told = True
        counts = " of ".join(str(sum(each)) for each in zip(*self._dull, strict=True))
        return (
            f"in the last {STEPS} steps, the samples of {counts} groups had equal rewards: {self._learned} learned "
            f"from these; {self._cure}"
        )
