"""Which groups of samples teach nothing, so that others are sampled in their place (Yu et al. 2025, "DAPO")."""

from __future__ import annotations

from collections.abc import Callable

from attrs import field, frozen

from corerl.rollout.scoring import Scores
from corerl.types import BoolArray, FloatArray, IntArray


@frozen(kw_only=True)
class DynamicSampling:
    """Drop groups that teach nothing, and sample other prompts in their place."""

    useful: Callable[[FloatArray, IntArray], BoolArray]  # what decides [B], peers [B] -> by their numbers
    max_replacements: int  # of a whole step; groups that are still missing then are filled up with dropped ones
    part: str = ""  # of the reward, which decides; "": the reward itself
    _known: set[str] = field(factory=set, init=False, eq=False)  # parts that samples have had

    def deciding(self, scores: Scores) -> FloatArray:
        """[B] what decides. Raises RewardError if no sample so far had the part."""
        self._known.update(scores.values)
        if self.part in self._known - scores.values.keys():  # other prompts, whose reward may have other parts
            return scores.rewards
        return scores.part(self.part, setting="algorithm.dynamic_sampling_on")
