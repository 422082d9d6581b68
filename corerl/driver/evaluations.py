"""Decide when held-out prompts are evaluated, and report how the policy does on them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from attrs import Factory, define, field

from corerl.driver.progress import Progress
from corerl.driver.sampling import Sampling
from corerl.plan.plan import Plan
from corerl.plugin.events import Evaluated, SampleShown
from corerl.rollout.evaluation import EvalSet, Evaluation, evaluate


def answers_in(state: Mapping[str, Any]) -> tuple[SampleShown, ...]:
    """The first evaluation's answers, from a checkpoint's state."""
    return tuple(SampleShown(**shown) for shown in state.get("before", []))


def _questions(answers: Sequence[SampleShown]) -> list[tuple[str, str]]:
    return [(shown.prompt, shown.answer) for shown in answers]


@define(kw_only=True, eq=False)
class Evaluations:
    """The evaluations of a run. When they are due depends only on the steps done, so a resumed run evaluates at the
    same steps as an uninterrupted one."""

    plan: Plan
    sampling: Sampling
    progress: Progress

    # Answers of the first evaluation, which a resumed run reads from its checkpoint, and of the last one.
    before: tuple[SampleShown, ...] = field(
        default=Factory(lambda self: answers_in(self.plan.start.state) if self.plan.run.trains else (), takes_self=True)
    )
    after: tuple[SampleShown, ...] = ()
    metrics: dict[str, float] = field(factory=dict)  # of the last one

    @property
    def any_due(self) -> bool:
        return any(self._due(eval_set) for eval_set, *_ in self.sampling.eval_sets)

    def run(self, served: Callable[[Coroutine[Any, Any, Evaluation]], Evaluation], *, always: bool = False) -> None:
        """Evaluate on the sets of prompts that are due, or on all; `served` waits for one of these."""
        due = [each for each in self.sampling.eval_sets if always or self._due(each[0])]
        if not due:
            return
        found = []
        for eval_set, sampler, reward in due:
            with self.progress.phase("eval"):
                found.append(served(evaluate(sampler, eval_set, reward)))
            if first := found[-1].first_failure:
                failed = sum(found[-1].failures.values())
                why = f"{failed} samples failed; the first: {first}" if failed else first
                self.progress.notice(f"evaluation{f' of {eval_set.name!r}' * bool(eval_set.name)}: {why}")
        shown = found[0].shown
        if due[0] is self.sampling.eval_sets[0]:
            if _questions(self.before) != _questions(shown):  # the checkpoint's may be of other data
                self.before = shown
            self.after = shown
        self.metrics = {name: value for each in found for name, value in each.metrics.items()}
        self.progress.emit(
            Evaluated(
                step=self.progress.steps_done,
                metrics=self.metrics,
                shown=shown,
                samples=[sample for each in found for sample in each.samples],
            )
        )

    def _due(self, eval_set: EvalSet) -> bool:
        if not eval_set.every or self.sampling.sampler is None:
            return False
        step = self.progress.steps_done
        if step == 0:
            return self.plan.eval.at_start
        return step % eval_set.every == 0 or step >= self.plan.run.steps
