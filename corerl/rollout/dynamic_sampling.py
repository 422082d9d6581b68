"""Which groups of samples teach nothing, so that others are sampled in their place (Yu et al. 2025, "DAPO")."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from corerl.rollout.scoring import Scores
from corerl.types import BoolArray, FloatArray, IntArray

SETTING = "algorithm.dynamic_sampling_on"


@frozen(kw_only=True)
class DynamicSampling:
    """Drop groups that teach nothing, and sample other prompts in their place."""

    useful: Callable[[FloatArray, IntArray], BoolArray]  # what decides [B], peers [B] -> by their numbers
    max_replacements: int  # of a whole step; groups that are still missing then are filled up with dropped ones
    part: str = ""  # of the reward, which decides; "": the reward itself
    known: bool = False  # whether samples are known to have the part, by an earlier step or a checkpoint's config

    def deciding(self, scores: Scores) -> FloatArray:
        """[B] what decides: of samples without the part, whose prompts' rewards may have others, it is the reward."""
        return scores.part(self.part, setting=SETTING) if self.part in scores.values else scores.rewards
