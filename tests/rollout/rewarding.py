"""Rewards as a run computes them, for tests of plugins that bring some."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from corerl.config.schema import RewardConfig
from corerl.rollout.reward_processes import RewardPool
from corerl.rollout.rewards import reward_of


def outcomes_of(config: RewardConfig, samples: Sequence[Any]) -> Sequence[Any]:
    """Of samples (prompt, text, earlier texts), scored in processes."""
    with contextlib.closing(RewardPool(reward_of(config), config)) as pool:
        return pool.outcomes(samples)
