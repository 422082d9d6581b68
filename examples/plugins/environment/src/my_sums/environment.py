"""Have the policy add, and score what it says."""

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from corerl.data import Prompt
from corerl.engines import GenerateRequest
from corerl.rollout import Judged, PromptSampler, Rollout


def judge(prompt: Prompt, text: str) -> Judged:
    """1 for the sum, and a tenth for any number."""
    parts = {"right": float(text == prompt.answer), "number": 0.1 * text.isdecimal()}
    return Judged(reward=sum(parts.values()), parts=parts)


class Sums(PromptSampler):
    async def generate(self, prompts: Sequence[Prompt], request: GenerateRequest, **how: Any) -> Rollout:
        rollout = await super().generate(prompts, request, **how)
        asked = [prompts[group] for group in rollout.batch.row_columns["group"]]
        return evolve(rollout, outcomes=[judge(*each) for each in zip(asked, rollout.texts, strict=True)])
