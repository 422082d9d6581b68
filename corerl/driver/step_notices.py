"""Lines about whatever makes a step teach less than it could, or take longer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from attrs import Factory, define, field

from corerl.driver.advantages import TrainBatch
from corerl.driver.equal_rewards import EqualRewards
from corerl.plan.algorithm import AlgorithmPlan
from corerl.rollout.sources.base import Scored
from corerl.types import SampleBatch, TrainResult

LONG = 1.0  # seconds of a compilation that are worth a line


@define(kw_only=True)
class StepNotices:
    """Looks at each step of a run, and remembers what is told only once."""

    algorithm: AlgorithmPlan
    samples: bool  # whether the run samples, and so could sample other prompts
    unseen: Mapping[int, str] = field(factory=dict)  # special tokens that texts leave out: id -> token; {} once told
    _equal: EqualRewards = Factory(
        lambda self: EqualRewards(self.algorithm.settings, compares=self.algorithm.compares, samples=self.samples),
        takes_self=True,
    )

    def of(
        self, scored: Scored, batch: TrainBatch | None, results: Mapping[str, Sequence[TrainResult]]
    ) -> Iterator[str]:
        """`batch` is None if the step was not for training; `results` are by role."""
        yield from self._of_unseen(scored.rollout.batch)
        if scored.first_failure:
            failed = sum(scored.failures.values())
            yield f"step {scored.step}: {failed} samples failed; the first: {scored.first_failure}"
        episodes, _ = scored.rollout.batch.episodes
        equal = self._equal.update(scored.rewards[episodes], scored.rollout.batch.rows["group"][episodes])
        if equal and not self.algorithm.asks_frozen:
            yield equal
        settings = self.algorithm.settings
        if batch and batch.metrics.get("correction/weight") == 0.0:
            yield (
                f"step {scored.step}: the policy learns nothing from its samples, since algorithm.correction="
                f"{settings.correction!r} gives all of their tokens weight 0; see rollout/logprob_diff, or widen the "
                f"band from correction_floor={settings.correction_floor:g} to "
                f"correction_cap={settings.correction_cap:g}"
            )
        for name, steps in results.items():  # time that was lost because a graph did not fit what came
            for each in (each for result in steps for each in result.compilations if each.why and each.seconds > LONG):
                yield (
                    f"step {scored.step}: a rank of the {name} compiled {each.what} anew, in {each.seconds:.0f} s: "
                    f"{each.why}"
                )

    def _of_unseen(self, batch: SampleBatch) -> Iterator[str]:
        """That the reward misses tokens that the policy samples."""
        if not self.unseen:
            return
        found = batch.columns["loss_mask"] & np.isin(batch.tokens, list(self.unseen))
        if found.any():
            before = np.concatenate([[0], np.cumsum(found)])
            samples = int((np.diff(before[batch.offsets]) > 0).sum())
            token = self.unseen[int(batch.tokens[found][0])]
            self.unseen = {}
            yield (
                f"{samples} of {len(batch)} samples contain special tokens, such as {token!r}, which the reward's text "
                "leaves out; set reward.special_tokens=true if it needs them"
            )
