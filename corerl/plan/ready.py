"""Ask extensions about a run whose plan has no problem: what they set, what they note, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen
from transformers import PreTrainedConfig, PreTrainedModel

from corerl.config.schema import Config
from corerl.config.toml_text import to_plain, toml_value
from corerl.errors import ConfigError, ContractError, UserError
from corerl.plan.algorithm import AlgorithmPlan
from corerl.plan.processes import ProcessPlan
from corerl.plugin.contract import ask_each
from corerl.plugin.observers import load_planners
from corerl.plugin.spec import PlanAnswer


@frozen(kw_only=True)
class PlanReady:
    """A run that has been planned without a problem, as `plan_ready` reads it."""

    config: Config  # as the run will record it: plugins' tables resolved, and nothing left to be chosen
    asked: Config  # the same, but [train] and the roles' own [train] say 'auto' where the user leaves a choice
    algorithm: AlgorithmPlan  # what each role is trained with, and what is passed through it without training
    processes: ProcessPlan  # the device, cpu or cuda; each role's ranks, with its backend; engines; their placement
    models: Mapping[str, PreTrainedConfig]  # by role
    built: Mapping[str, PreTrainedModel]  # by role, on meta; not to be changed, as others see it too
    device_memory: int  # bytes of this machine's smallest GPU; 0 on CPUs, and for a cluster, whose GPUs are not known
    starting: bool  # False where the plan is only checked, or made for other sizes


@frozen(kw_only=True)
class Decisions:
    """What extensions have said so far of the plans of a run."""

    settings: Mapping[str, Any] = field(factory=dict)  # dotted key -> plain value, where the first plan had another
    by: Mapping[str, str] = field(factory=dict)  # dotted key -> the extension that sets it, also to what a plan had
    notices: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()  # of the last plan
    final: bool = True  # whether the last plan has all settings

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={toml_value(value)}" for key, value in self.settings.items()]

    def explained(self, error: UserError) -> ConfigError:
        """The error of a plan with these settings, with who has set them."""
        lines = [f"{key}: set to {toml_value(value)} by {self.by[key]}" for key, value in self.settings.items()]
        return ConfigError("\n".join([error.message, *lines]))


def decide(plan: PlanReady, before: Decisions, *, run_dir: str) -> Decisions:
    """Ask each extension that plans, in the config's order. Raises a UserError of theirs, HookFailed for any other
    error, ContractError for what is no answer, and ConfigError for answers that contradict each other."""
    settings, by = dict(before.settings), {key: before.by[key] for key in before.settings}
    new: set[str] = set()
    # What is said of a plan is said again, or not, of the next one; but not why there is a next one.
    reasons, remarks, problems = list(before.notices), list[str](), list[str]()
    has = to_plain(plan.config)
    for name, answer in ask_each(load_planners(plan.config.chosen_extensions, run_dir), "plan_ready", plan=plan):
        if answer is None:
            continue
        if not isinstance(answer, PlanAnswer):
            raise ContractError(f"{name}: plan_ready returned {type(answer).__name__}, expected PlanAnswer or None")
        wanted = {key: to_plain(value) for key, value in answer.settings.items()}
        for key, value in wanted.items():
            if settings.setdefault(key, value) != value:
                raise ConfigError(
                    f"{key}: {by[key]} sets it to {toml_value(settings[key])}, and {name} to {toml_value(value)}; "
                    "remove one of these extensions, or change its options"
                )
            by.setdefault(key, name)
        changed = {key for key, value in wanted.items() if key not in before.settings and _at(has, key) != value}
        new |= changed
        (reasons if changed else remarks).extend(answer.notices)
        problems += answer.problems
    return Decisions(
        settings={key: value for key, value in settings.items() if key in before.settings or key in new},
        by=by,
        notices=tuple(dict.fromkeys(reasons if new else [*reasons, *remarks])),
        problems=tuple(problems),
        final=not new,
    )


def _at(plain: Any, key: str) -> Any:
    """The value at a dotted key; None if there is none."""
    for name in key.split("."):
        plain = plain.get(name) if isinstance(plain, Mapping) else None
    return plain
