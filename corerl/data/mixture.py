"""Prompt sources made of others: several as one, mixed by weight; one whose prompts are only evaluated."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from attrs import evolve

from corerl.data.prompts import Prompt, PromptSource
from corerl.errors import DataError
from corerl.types import IntArray, offsets_of


class MixedPrompts(PromptSource):
    """The prompts of several sources, numbered one source after the other. Each source keeps its own split.

    All sources hold out the same number; held-out prompts alternate between the sources.
    """

    def __init__(self, sources: Mapping[str, PromptSource], weights: Mapping[str, float]) -> None:
        self._names = tuple(sources)
        self._sources = tuple(sources.values())
        (shares,) = zip(*(source.shares for source in self._sources), strict=True)  # each is unmixed
        self._starts = offsets_of([len(share.digests) for share in shares])[:-1]
        self.asked = np.concatenate([source.asked for source in self._sources])
        self.chat = any(source.chat for source in self._sources)
        self.notices = tuple(notice for source in self._sources for notice in source.notices)
        self.divide(
            [
                evolve(
                    share,
                    name=name,
                    weight=weights[name],
                    first=int(start),
                    train=share.train + start,
                    held_out=share.held_out + start,
                )
                for name, share, start in zip(self._names, shares, self._starts, strict=True)
            ]
        )

    def prompt(self, index: int) -> Prompt:
        at, own = self._place(index)
        return evolve(self._sources[at].prompt(own), index=index, source=self._names[at])

    def where(self, index: int) -> str:
        at, own = self._place(index)
        return self._sources[at].where(own)

    def _place(self, index: int) -> tuple[int, int]:
        """The source that a prompt comes from, and its index there."""
        at = int(np.searchsorted(self._starts, index, side="right")) - 1
        return at, index - int(self._starts[at])


class HeldOut(PromptSource):
    """These prompts of a source. It leaves out what the source does, and may leave out more."""

    def __init__(self, source: PromptSource, indices: IntArray) -> None:
        self._source, self.chat = source, source.chat
        self.shares, self.asked, self.notices = source.shares, source.asked, source.notices
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
