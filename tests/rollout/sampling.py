"""What sources sample in tests: a few digits, which a model is to sort."""

from __future__ import annotations

from typing import Any

import numpy as np

from corerl.data.prompts import PromptStream, SortDigits
from corerl.engines.base import SamplingParams
from corerl.models.tokenizer import load_tokenizer
from corerl.rollout.ordered import OneStepOffRollouts, OrderedRollouts
from corerl.rollout.rewards import Reward, find_reward
from corerl.rollout.sampler import Rollout
from corerl.rollout.scored import ScoredRollout
from corerl.rollout.scoring import AsyncScorer, Scorer, Scores
from tests.rollout.engines import Engines, aside
from tests.rollout.samplers import prompt_sampler

TOKENIZER = load_tokenizer(tokenizer="characters:0123456789>s", path="")
PARAMS = SamplingParams(max_tokens=6, stop_tokens=(2,))
REWARD = find_reward("position-match", {})
PROMPTS, SAMPLES = 3, 2
KINDS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "streamed": {"singly": True},
    "one-step-off": {"kind": OneStepOffRollouts},
}


def stream() -> PromptStream:
    return PromptStream(SortDigits(held_out=10, seed=7), seed=7)


def upcoming(count: int) -> list[int]:
    return [prompt.index for prompt in stream().take(count)]


def source(engines: Engines, *, kind: type[OrderedRollouts] = OrderedRollouts, **fields: Any) -> OrderedRollouts:
    """On demand, unless `kind` or `fields` say otherwise; a scorer scores in threads of its own."""
    return kind(**given(engines, **fields))


def given(engines: Engines, *, reward: AsyncScorer | Scorer | Reward = REWARD, **fields: Any) -> dict[str, Any]:
    """The fields that all schedules have."""
    return {
        "stream": stream(),
        "sampler": prompt_sampler(tokenizer=TOKENIZER, generate=engines.fleet.generate, seed=7),
        "reward": reward if isinstance(reward, AsyncScorer) else aside(reward),
        "params": PARAMS,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "engines": engines.fleet,
        "steps": 4,
        **fields,
    }


def indices(scored: ScoredRollout) -> list[int]:
    return [prompt.index for prompt in scored.rollout.prompts]


def versions(scored: ScoredRollout) -> set[int]:
    batch = scored.rollout.batch
    return set(batch.columns["versions"][batch.columns["loss_mask"]].tolist())


def assert_same(found: ScoredRollout, wanted: ScoredRollout) -> None:
    assert (found.step, found.rollout.texts, found.rollout.prompts) == (
        wanted.step,
        wanted.rollout.texts,
        wanted.rollout.prompts,
    )
    assert (found.exact_match, found.failures) == (wanted.exact_match, wanted.failures)
    np.testing.assert_array_equal(found.rewards, wanted.rewards)
    np.testing.assert_array_equal(found.rollout.batch.tokens, wanted.rollout.batch.tokens)
    np.testing.assert_array_equal(found.rollout.batch.row_columns["group"], wanted.rollout.batch.row_columns["group"])


class ByIndex:
    """Half of all prompts have groups whose rewards differ."""

    def score(self, rollout: Rollout, *, partial: bool = False) -> Scores:
        groups, samples = rollout.batch.row_columns["group"], rollout.batch.row_columns["sample"]
        odd = np.array([rollout.prompts[group].index % 2 for group in groups])
        return Scores(rewards=(odd * samples).astype(np.float32), failures={"raised": 1}, first="the first")
