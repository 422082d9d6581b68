"""Lines about whatever makes a step teach less than it could, or take longer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from attrs import define, field

from corerl.algorithms.advantages import differ
from corerl.driver.advantages import TrainBatch
from corerl.driver.metrics import without_spread
from corerl.models.tokenizer import special_tokens
from corerl.plan.algorithm import AlgorithmPlan
from corerl.plan.data import RolloutPlan
from corerl.plan.plan import Plan
from corerl.rollout.scored import ScoredRollout
from corerl.types import TURN_REWARDS, SampleBatch, TrainResult

LONG = 1.0  # seconds of a compilation that are worth a line
STEPS = 3  # in a row with equal rewards
NEARLY_ALL = 0.9  # share of a step's groups


@define(kw_only=True)
class StepNotices:
    """Reads each step of a run, and remembers what is reported only once."""

    algorithm: AlgorithmPlan
    samples: bool  # whether the run samples, and so could sample other prompts
    unseen: Mapping[int, str] = field(
        factory=dict
    )  # special tokens that texts leave out: id -> token; {} once reported
    max_tokens: int = 0  # rollout.max_tokens of the samples; 0: not known
    _reported: set[str] = field(factory=set, init=False)  # names of lines
    _equal: int = field(default=0, init=False)  # steps in a row whose rewards teach nothing

    @classmethod
    def of_run(cls, plan: Plan) -> StepNotices:
        rollout, samples = plan.rollout, plan.run.samples
        return cls(
            algorithm=plan.algorithm,
            samples=samples,
            unseen=unseen_tokens(rollout) if samples else {},
            max_tokens=rollout.params.max_tokens if samples else 0,
        )

    def of(
        self, scored: ScoredRollout, batch: TrainBatch | None, results: Mapping[str, Sequence[TrainResult]]
    ) -> Iterator[str]:
        """`batch` is None if the step was not for training; `results` are by role."""
        yield from self._of_unseen(scored.rollout.batch)
        once = self._of_parts(scored) | self._of_turns(scored.rollout.batch, trains=batch is not None)
        yield from (f"step {scored.step}: {once[name]}" for name in once if name not in self._reported)
        self._reported |= once.keys()
        if scored.first_failure:
            failed = sum(scored.failures.values())
            yield f"step {scored.step}: {failed} samples failed; the first: {scored.first_failure}"
        if not self.algorithm.asks_frozen:
            yield from self._of_equal_rewards(scored)
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
                    f"step {scored.step}: a rank of the {name} compiled {each.what} again, in {each.seconds:.0f} s: "
                    f"{each.why}"
                )

    def _of_equal_rewards(self, scored: ScoredRollout) -> Iterator[str]:
        """That several steps in a row taught nothing: nearly all groups had equal rewards or, where groups are not
        compared, all samples had."""
        episodes, _ = scored.rollout.batch.episodes
        rewards = scored.rewards[episodes]
        equal, groups = without_spread(rewards, scored.rollout.batch.rows["group"][episodes])
        same = len(rewards) > 1 and not differ(rewards.min(), rewards.max())
        dull = equal >= NEARLY_ALL * groups if self.algorithm.compares else same
        self._equal = self._equal + 1 if dull else 0
        if self._equal < STEPS or "equal" in self._reported:
            return
        self._reported.add("equal")
        settings, others = self.algorithm.settings, ""
        if self.algorithm.compares and self.samples:
            others = f"raise algorithm.dynamic_sampling={settings.dynamic_sampling}, or "
            if not settings.dynamic_sampling:
                others = "set algorithm.dynamic_sampling, which samples other prompts in their place, or "
        learned = "nothing but shorter answers is" if settings.overlong == "penalty" else "nothing is"
        yield (
            f"nearly all groups had equal rewards, {STEPS} steps in a row, now {equal} of {groups}"
            f"{f', all {rewards[0]:g}' if same else ''}: {learned} learned from these; check reward.name, "
            f"data.answer_key and the samples; if these are right, {others}use prompts that this model answers right "
            "sometimes"
        )

    def _of_parts(self, scored: ScoredRollout) -> dict[str, str]:
        """Notices about the part of the reward that dynamic sampling reads, by name."""
        settings, parts, lines = self.algorithm.settings, scored.parts, dict[str, str]()
        part, missing = settings.dynamic_sampling_on, scored.counts.get("groups_missing", 0)
        if not settings.dynamic_sampling or not self.samples:
            return lines
        if not part and len(parts) > 1:
            lines["parts"] = (
                f"the reward has the parts {', '.join(map(repr, parts))}; groups are equal where the sums of all parts "
                "are; name the part that decides in algorithm.dynamic_sampling_on, if one does"
            )
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


def unseen_tokens(plan: RolloutPlan) -> dict[int, str]:
    """The special tokens that the texts of samples leave out, by id, besides those that any tokenizer has and those
    that end samples."""
    tokenizer = plan.tokenizer
    if plan.rewarding.special_tokens:
        return {}
    common = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    known = common | set(plan.params.stop_tokens)
    return {index: token for index, token in special_tokens(tokenizer).items() if index not in known}
