"""A sampler of single responses, for tests that say of a run only what they are about."""

from __future__ import annotations

from typing import Any

from corerl.engines.base import SamplingParams
from corerl.plugin.spec import NoOptions
from corerl.rollout.sampler import PromptSampler, SamplerContext


def context(**known: Any) -> SamplerContext:
    return SamplerContext(**{"loop": None, "params": SamplingParams(), **known})


def prompt_sampler(**known: Any) -> PromptSampler:
    return PromptSampler(NoOptions(), context(**known))
