"""Several prompt sources as one, drawn by weight."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from attrs import evolve

from corerl.data.prompts import Prompt, PromptSource, Share
from corerl.types import offsets_of


class MixedPrompts(PromptSource):
    """The prompts of several sources, numbered one source after the other. Each source keeps its own split.

    All sources hold out the same number; held-out prompts alternate between the sources.
    """

    def __init__(self, sources: Mapping[str, PromptSource], weights: Mapping[str, float]) -> None:
        self._names = tuple(sources)
        self._sources = tuple(sources.values())
        self._weights = tuple(weights[name] for name in self._names)
        self._starts = offsets_of([len(source) for source in self._sources])[:-1]
        self.chat = any(source.chat for source in self._sources)
        self.notices = tuple(notice for source in self._sources for notice in source.notices)
        self.unanswered = sum(source.unanswered for source in self._sources)
        self.first_unanswered = next(
            (
                int(start) + source.first_unanswered
                for source, start in zip(self._sources, self._starts, strict=True)
                if source.unanswered
            ),
            0,
        )
        self.train = np.concatenate([share.train for share in self.shares])
        held_out = [source.held_out + start for source, start in zip(self._sources, self._starts, strict=True)]
        self.held_out = np.stack(held_out, axis=1).ravel()

    @property
    def shares(self) -> tuple[Share, ...]:
        return tuple(
            Share(name=name, weight=weight, train=source.train + start)
            for name, weight, source, start in zip(self._names, self._weights, self._sources, self._starts, strict=True)
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
