"""Extensions that read a plan, and answer as their options say."""

from __future__ import annotations

from typing import Any

from attrs import evolve, field, frozen

from corerl.errors import DataError
from corerl.plan.plan import PlanReady
from corerl.plugin import ExtensionSpec, PlanAnswer, Process


@frozen(kw_only=True)
class Answers:
    settings: dict[str, Any] = field(factory=dict)
    notices: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    does: str = "answers"


SEEN: list[PlanReady] = []


class Planner:
    def __init__(self, *, options: Answers, run_dir: str) -> None:
        self.options = options

    def plan_ready(self, plan: PlanReady) -> Any:
        SEEN.append(plan)
        options = self.options
        match options.does:
            case "raises":
                return {}["missing"]
            case "refuses":
                raise DataError("data.source: not on Sundays; use another")
            case "returns a dict":
                return {"settings": options.settings}
            case "counts":
                return PlanAnswer(notices=[f"{plan.config.run.steps} steps"])
            case "changes its mind":
                return PlanAnswer(settings={"train.mini_batches": plan.config.train.mini_batches + 1})
            case _:
                return PlanAnswer(settings=options.settings, notices=options.notices, problems=options.problems)


FIRST = ExtensionSpec(
    implementation="tests.plan.planners:Planner",
    config=Answers,
    api=(2, 0),
    summary="answers as its options say",
    process=Process.DRIVER,
    plans=True,
)
SECOND = FIRST
UNASKED = evolve(FIRST, plans=False)
