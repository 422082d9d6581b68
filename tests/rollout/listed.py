"""Held-out prompts that a test lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from corerl.data.prompts import Prompt, PromptSource


class Listed(PromptSource):
    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = {prompt.index: prompt for prompt in prompts}
        self.train, self.held_out = np.zeros(0, np.int64), np.array(list(self._prompts), np.int64)

    def prompt(self, index: int) -> Prompt:
        return self._prompts[index]
