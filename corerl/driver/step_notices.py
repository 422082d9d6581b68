"""Lines about whatever makes a step teach less than it could, or take longer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from attrs import Factory, define, field

from corerl.config.schema import RewardConfig
from corerl.driver.advantages import TrainBatch
from corerl.driver.equal_rewards import EqualRewards
from corerl.plan.algorithm import BY_ALL_PARTS, AlgorithmPlan, has_several_parts
from corerl.rollout.sources.base import Scored
from corerl.types import TURN_REWARDS, SampleBatch, TrainResult

LONG = 1.0  # seconds of a compilation that are worth a line


@define(kw_only=True)
class StepNotices:
    """Looks at each step of a run, and remembers what is told only once."""

    algorithm: AlgorithmPlan
    samples: bool  # whether the run samples, and so could sample other prompts
    unseen: Mapping[int, str] = field(factory=dict)  # special tokens that texts leave out: id -> token; {} once told
    rewarding: RewardConfig = field(factory=RewardConfig)
    max_tokens: int = 0  # rollout.max_tokens of the samples; 0: not known
    _said: set[str] = field(factory=set, init=False)  # names of lines
    _equal: EqualRewards = Factory(
        lambda self: EqualRewards(self.algorithm.settings, compares=self.algorithm.compares, samples=self.samples),
        takes_self=True,
    )

    def of(
        self, scored: Scored, batch: TrainBatch | None, results: Mapping[str, Sequence[TrainResult]]
    ) -> Iterator[str]:
        """`batch` is None if the step was not for training; `results` are by role."""
        yield from self._of_unseen(scored.rollout.batch)
        once = self._of_parts(scored) | self._of_turns(scored.rollout.batch, trains=batch is not None)
        yield from (f"step {scored.step}: {once[name]}" for name in once if name not in self._said)
        self._said |= once.keys()
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

    def _of_parts(self, scored: Scored) -> dict[str, str]:
        """What dynamic sampling goes by, as far as a config does not tell: lines by names."""
        settings, parts, lines = self.algorithm.settings, scored.parts, dict[str, str]()
        part, missing = settings.dynamic_sampling_on, scored.counts.get("groups_missing", 0)
        if not settings.dynamic_sampling or not self.samples:
            return lines
        if not part and len(parts) > 1 and not has_several_parts(self.rewarding):
            lines["parts"] = f"the reward has the parts {', '.join(map(repr, parts))}; {BY_ALL_PARTS}"
        if part and parts and part not in parts:
            lines["part"] = (
                f"no sample has the part {part!r} of the reward (algorithm.dynamic_sampling_on), only "
                f"{', '.join(map(repr, parts))}: groups are equal where their whole rewards are"
            )
        elif part and missing and self.algorithm.compares:
            lines["missing"] = (
                f"{missing} of {len(scored.rollout.prompts)} groups are equal in {part!r}, and too few others were "
                f"found (algorithm.dynamic_sampling={settings.dynamic_sampling}): the policy learns from them what "
                "else differs in their rewards; rollout/groups_missing counts such groups"
            )
        return lines

    def _of_turns(self, batch: SampleBatch, *, trains: bool) -> dict[str, str]:
        """What becomes of the turns of episodes: lines by names."""
        settings, rows, lines = self.algorithm.settings, batch.rows, dict[str, str]()
        adds_up = trains and not self.algorithm.credits_turns and not settings.advantages
        rewards = batch.columns.get(TURN_REWARDS)
        if adds_up and rewards is not None and rewards.any() and (rows["turns"] > 1).any():
            lines["turns"] = (
                f"the rewards of an episode's turns are only added up by algorithm.name={settings.name!r}, and all "
                "tokens of an episode get one advantage; to credit each turn with its own, use an algorithm whose spec "
                "says credits_turns, or algorithm.advantages"
            )
        if self.max_tokens and "span" in rows:
            full = rows["truncated"] & (rows["span"] < self.max_tokens)  # else its last answer was cut
            if full.any():
                lines["full"] = (
                    f"{full.sum()} of {len(full)} rows ended since what came behind an answer, such as a tool's "
                    f"result, left no room in rollout.max_tokens={self.max_tokens}; they count as truncated, also for "
                    "algorithm.overlong"
                )
        return lines

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
