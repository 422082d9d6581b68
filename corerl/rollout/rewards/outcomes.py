"""Score samples of which some bring a reward: those are taken, the others scored."""

from __future__ import annotations

from collections import Counter

import numpy as np
from attrs import evolve

from corerl.errors import RewardError
from corerl.rollout.rewards.base import Failure, Judged, Scorer, Scores, added, gathered
from corerl.rollout.sampler import Rollout


class OutcomeScorer:
    """Takes the rewards that samples bring, and scores the others with another scorer."""

    def __init__(self, scorer: Scorer, *, failed_value: float) -> None:
        self._scorer = scorer
        self._failed_value = failed_value

    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        """An episode is scored once, by its last answer, and all its rows get that reward. Raises RewardError if every
        sample fails, unless they are only a `part` of a batch."""
        episodes, episode_of = rollout.batch.episodes
        if len(episodes) == len(episode_of):
            return self._score(rollout, part)
        scores = self._score(rollout.at(episodes), part)
        values = {name: each[episode_of] for name, each in scores.values.items()}
        return evolve(scores, rewards=scores.rewards[episode_of], failed=scores.failed[episode_of], values=values)

    def _score(self, rollout: Rollout, part: bool) -> Scores:
        outcomes = rollout.outcomes
        unknown = np.array([row for row, outcome in enumerate(outcomes) if outcome is None], dtype=np.int64)
        if not len(outcomes) or len(unknown) == len(outcomes):
            return self._scorer.score(rollout, part=part)
        returned = [each if isinstance(each, Failure | Judged) else Judged(reward=each or 0.0) for each in outcomes]
        known = gathered(returned, self._failed_value, part=True)
        rewards, failed, first = known.rewards.copy(), known.failed.copy(), known.first
        failures, parts, values = Counter(known.failures), known.parts, {**known.values}
        if len(unknown):
            scores = self._scorer.score(rollout.at(unknown), part=True)
            rewards[unknown], failed[unknown] = scores.rewards, scores.failed
            failures.update(scores.failures)
            parts = added(parts, scores.parts)
            for name, each in scores.values.items():
                values.setdefault(name, np.full(len(rewards), np.nan, np.float32))[unknown] = each
            if scores.first and failed.argmax() in unknown:
                first = scores.first
        if failed.all() and not part:
            raise RewardError(f"{first}; none of the {len(failed)} samples has a reward")
        return Scores(rewards=rewards, failures=dict(failures), first=first, failed=failed, parts=parts, values=values)
