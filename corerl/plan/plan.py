"""A run before its first process, in slices: each part of the run takes its own; and what extensions are
asked about a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from corerl.cluster.forks import Forks
from corerl.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    EvalConfig,
    ExtensionChoice,
    RolloutConfig,
    RunConfig,
    WeightsConfig,
)
from corerl.config.toml_text import to_plain, toml_value
from corerl.errors import ConfigError, ContractError
from corerl.plan.algorithm import AlgorithmPlan
from corerl.plan.data import RolloutPlan
from corerl.plan.models import RoleModel
from corerl.plan.processes import ProcessPlan
from corerl.plan.resolve import Plugins
from corerl.plan.resume import Start
from corerl.plan.roles import RolePlan
from corerl.plugin.observers import load_planners
from corerl.plugin.spec import PlanAnswer
from corerl.rollout.evaluation import EvalSet


@frozen(kw_only=True)
class Plan:
    """A fully resolved and checked run, before it touches Ray or a device."""

    title: str
    run: RunConfig
    start: Start
    algorithm: AlgorithmPlan
    processes: ProcessPlan
    rollout: RolloutPlan
    cluster: ClusterConfig
    weights: WeightsConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig
    eval_sets: Sequence[EvalSet]  # that of data.held_out first, if there is one
    extensions: tuple[ExtensionChoice, ...]
    given: Config  # what it is made of, to make others of
    record: Mapping[str, Any]  # the config as plain data, as the run keeps it: with its plugins' tables resolved
    notices: tuple[str, ...]  # a line each, what a user may want to know before the first step

    @property
    def first_step(self) -> int:
        """Rollout steps already done; 0 for a run that only samples, which takes just the weights of a checkpoint."""
        return 0 if self.run.mode == "rollout-only" else int(self.start.state.get("rollout_step", 0))

    def started_by(self, forks: Forks | None) -> Plan:
        """A copy whose ranks and engines are started by `forks`."""
        placement = evolve(self.processes.placement, forks=forks)
        return evolve(self, processes=evolve(self.processes, placement=placement))


@frozen(kw_only=True)
class GroupPlan:
    """The ranks of one role, alone or with engines."""

    role: RolePlan
    processes: ProcessPlan  # of the role and its engines, if it has some
    cluster: ClusterConfig
    weights: WeightsConfig
    rollout: RolloutConfig
    context_length: int  # the most tokens of a sample; 0: unlimited
    notices: tuple[str, ...]  # a line each


# ---- extensions ------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class PlanReady:
    """A run that has been planned without a problem, as `plan_ready` reads it."""

    config: Config  # as the run will record it: plugins' tables resolved, and nothing left to be chosen
    asked: Config  # the same, but [train] and the roles' own [train] say 'auto' where the user leaves a choice
    algorithm: AlgorithmPlan  # what each role is trained with, and what is passed through it without training
    plugins: Plugins  # with their specs
    processes: ProcessPlan  # the device, cpu or cuda; each role's ranks, with its backend; engines; their placement
    models: Mapping[str, RoleModel]  # by role, built on meta; not to be changed, as others see them too
    rollout: RolloutPlan
    eval_sets: Sequence[EvalSet]
    start: Start
    record: Mapping[str, Any]  # the config, as plain data
    starting: bool  # False where the plan is only checked, or made for other sizes


@frozen(kw_only=True)
class Setting:
    """A value that an extension wants a run to be planned with."""

    value: Any  # plain data
    by: str  # the extension's name


def ask_extensions(
    plan: PlanReady, chosen: Mapping[str, Setting], *, run_dir: str
) -> tuple[list[PlanAnswer], dict[str, Setting]]:
    """What each extension that plans answers, in the config's order, and the settings, by dotted key, that they want
    besides those `chosen` before. Raises a UserError of theirs, HookFailed for any other error, ContractError for what
    is no answer, and ConfigError for settings that contradict each other."""
    answers: list[PlanAnswer] = []
    wanted: dict[str, Setting] = {}
    for name, answer in load_planners(plan.config.chosen_extensions, run_dir).ask_each("plan_ready", plan=plan):
        if answer is None:
            continue
        if not isinstance(answer, PlanAnswer):
            raise ContractError(f"{name}: plan_ready returned {type(answer).__name__}, expected PlanAnswer or None")
        answers.append(answer)
        for key, given in answer.settings.items():
            value = to_plain(given)
            held = chosen.get(key) or wanted.setdefault(key, Setting(value=value, by=name))
            if held.value != value:
                raise ConfigError(
                    f"{key}: {held.by} sets it to {toml_value(held.value)}, and {name} to {toml_value(value)}; "
                    "remove one of these extensions, or change its options"
                )
    return answers, wanted
