"""Rewards as a run computes them, and samples to score; for tests of plugins that bring some too."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import evolve

from corerl.config.schema import RewardConfig
from corerl.data.prompts import Prompt
from corerl.rollout.reward_processes import RewardPool
from corerl.rollout.rewards import reward_of
from corerl.rollout.sampler import Rollout
from tests.marked import marked

SORT = Prompt(index=35018, text="35018>", answer="01358")


def outcomes_of(config: RewardConfig, samples: Sequence[Any]) -> Sequence[Any]:
    """Of samples (prompt, text, earlier texts), scored in processes."""
    with contextlib.closing(RewardPool(reward_of(config), config)) as pool:
        return pool.outcomes(samples)


def rollout(
    texts: Sequence[str], prompt: Prompt = SORT, outcomes: Sequence[Any] = (), **rows: Sequence[Any]
) -> Rollout:
    """A sample of the prompt for each text; further columns of `rows`."""
    batch = marked(*"x" * len(texts), of_rows={"group": [0] * len(texts), **rows})
    batch = evolve(batch, tokens=np.zeros_like(batch.tokens))
    return Rollout(batch=batch, prompts=(prompt,), texts=list(texts), outcomes=list(outcomes))
