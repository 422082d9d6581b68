"""What sources draw in tests: a few digits, which a model is to sort."""

from __future__ import annotations

from typing import Any

from corerl.data.prompts import PromptStream, SortDigits
from corerl.engines.base import SamplingParams
from corerl.models.tokenizer import load_tokenizer
from corerl.rollout.rewards.base import Scoring
from corerl.rollout.rewards.lookup import resolve_reward
from corerl.rollout.sources.base import BatchSampler
from tests.rollout.engines import Engines, aside
from tests.rollout.samplers import prompt_sampler

TOKENIZER = load_tokenizer(tokenizer="characters:0123456789>s", path="")
PARAMS = SamplingParams(max_tokens=6, stop_tokens=(2,))
REWARD = resolve_reward("position-match", {})
PROMPTS, SAMPLES = 3, 2


def stream(seed: int = 7) -> PromptStream:
    return PromptStream(SortDigits(held_out=10, seed=seed), seed=seed)


def upcoming(count: int) -> list[int]:
    return [prompt.index for prompt in stream().take(count)]


def drawing(engines: Engines, *, seed: int = 7, reward: Scoring | None = None, **parts: Any) -> BatchSampler:
    given = {
        "stream": stream(seed),
        "sampler": prompt_sampler(tokenizer=TOKENIZER, generate=engines.fleet.generate, seed=7),
        "reward": reward or aside(REWARD),
        "params": PARAMS,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        **parts,
    }
    return BatchSampler(**given)  # type: ignore[arg-type]
