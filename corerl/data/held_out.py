"""Prompts of a source that are only evaluated: those that it holds out, or all of them."""

from __future__ import annotations

import numpy as np

from corerl.data.prompts import Prompt, PromptSource
from corerl.errors import DataError
from corerl.types import IntArray


class HeldOut(PromptSource):
    """These prompts of a source. It leaves out what the source does, and may leave out more."""

    def __init__(self, source: PromptSource, indices: IntArray) -> None:
        self._source, self.chat, self.characters = source, source.chat, source.characters
        self.shares, self.asked, self.notices = source.shares, source.asked, source.notices
        self.unanswered, self.first_unanswered = source.unanswered, source.first_unanswered
        self.train, self.held_out = np.zeros(0, np.int64), indices

    def prompt(self, index: int) -> Prompt:
        return self._source.prompt(index)

    def where(self, index: int) -> str:
        return self._source.where(index)

    def held_out_prompts(self) -> list[Prompt]:
        return [each for each in super().held_out_prompts() if each.index not in self._source.left_out]

    def leave_out(self, indices: frozenset[int]) -> None:
        self.left_out |= indices
        if self.left_out.issuperset(self.held_out.tolist()):
            raise DataError(f"all {len(self)} prompts are skipped")
