"""Predict what the devices of a run on GPUs will hold; refuse what cannot fit, recompute layers where training would
not fit without, and list slow paths."""

from __future__ import annotations

from typing import Any

from corerl import hookimpl
from corerl.plan.plan import PlanReady
from corerl.plugin import PlanAnswer


class Forecasting:
    def __init__(self, *, options: Any, run_dir: str) -> None:
        pass

    @hookimpl
    def plan_ready(self, plan: PlanReady) -> PlanAnswer | None:
        if plan.processes.device != "cuda" or not plan.config.run.trains:
            return None
        from corerl_forecast.forecast import Forecaster  # slow to import: takes seconds
        from corerl_forecast.recompute import chosen, settings_of
        from corerl_forecast.slow import slow_paths

        forecaster = Forecaster.of(plan)
        memory = forecaster.forecast()
        choices = chosen(plan, {role for role in plan.processes.roles if memory.tight(role, there=plan.device_memory)})
        settings = settings_of(choices, plan.asked)
        lines = [
            f"{plan.asked.train_table_of(role)}.recompute: 'auto' is {choice!r} for the {role}"
            for role, choice in choices.items()
        ]
        if "full" in choices.values():  # what is predicted of that plan follows when it is made
            return PlanAnswer(settings=settings, notices=lines)
        return PlanAnswer(
            settings=settings,
            notices=[*lines, *slow_paths(plan), *memory.lines(fullest=plan.starting)],
            problems=list(forecaster.too_large(memory, there=plan.device_memory)) if plan.device_memory else (),
        )
