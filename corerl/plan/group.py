"""Plan the ranks of one role alone, for a loop other than CoreRL's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from corerl.cluster.arrangement import Placement, arrange
from corerl.config.problems import Problems
from corerl.config.schema import AlgorithmConfig, CheckpointConfig, Config, RolloutConfig, RunConfig
from corerl.errors import ConfigError
from corerl.models.build import stored_buffers
from corerl.models.config import experts, hf_config
from corerl.models.layouts import choose_layout
from corerl.plan.algorithm import contradictions as against_algorithm
from corerl.plan.algorithm import plan_algorithm
from corerl.plan.check import contradictions_of_a_group
from corerl.plan.devices import has_bfloat16, resolve_device
from corerl.plan.environment import environment_of, process_environment
from corerl.plan.experts import against_aux_loss, unread_fields, without_adapters
from corerl.plan.inputs import built_model
from corerl.plan.lora import against_adapters, against_sending, check_adapters, settle_adapters
from corerl.plan.model_files import require_same_tensors, require_weights, saved_shapes
from corerl.plan.resolve import ROLES, has_value_head, ignored_tables, is_frozen, load_plugins, settle_algorithm
from corerl.plan.roles import RolePlan, plan_role
from corerl.plan.settle import settled, with_absolute_paths, with_choices
from corerl.plan.user_code import require_no_code_of_a_model
from corerl.plugin.transports import AUTO


@frozen(kw_only=True)
class GroupPlan:
    role: RolePlan
    placement: Placement
    address: str  # of a running Ray cluster; empty starts one
    watchdog: float  # seconds, as `cluster.watchdog`
    health_timeout: float  # likewise
    start_timeout: float  # likewise
    notices: tuple[str, ...]  # a line each


def plan_group(config: Config, role: str, *, resume: str) -> GroupPlan:
    """Resolve and check what a config says of a role. `resume` is what a `save` has written; "" starts from the model.
    Raises UserError with a line for each problem; checks that depend on a wrong setting are skipped."""
    problems = Problems()
    if role not in ROLES:
        raise ConfigError(f"unknown role {role!r}; there are {', '.join(ROLES)}")
    with problems.stage("algorithm's spec", path="algorithm.name"):
        config = settle_algorithm(_alone(config))
    config = settle_adapters(config, problems)
    if problems.none_in("algorithm's spec"):
        found = (*contradictions_of_a_group(config), *against_sending(config), *against_adapters(config))
        for line in (*found, *against_algorithm(config)):
            problems.add(line)
    if role not in config.chosen_roles:
        problems.add(f"roles.{role}: missing; add it, such as roles.{role}.ranks=1, to start this role")
    with problems.stage("user's code"):
        require_no_code_of_a_model(config)
    device = ""
    with problems.stage("cluster.device"):
        device = resolve_device(config.cluster.device, address=config.cluster.address)
    config = load_plugins(with_absolute_paths(config), problems)
    problems.raise_all()

    asked, own, table = config, config.model_of(role), config.model_table_of(role)
    config = with_choices(config, device, bfloat16=has_bfloat16(config.cluster, device))
    hf = hf_config(own)
    model = built_model(config, role, hf)
    check_adapters(config, {role: hf}, problems)
    for line in against_aux_loss(config, {role: model}):
        problems.add(line)
    problems.raise_all()
    layout = choose_layout(model, config.train_of(role).layout)
    unused = ""
    if resume and is_frozen(config, role):
        raise ConfigError(f"resume: {resume!r}, but the {role} is frozen, and no checkpoint holds it; remove it")
    if resume:
        saved = saved_shapes(hf, value_head=has_value_head(config, role), lora=config.lora_of(role))
        require_same_tensors(_part_of(resume, role), role, saved)
    if own.path and (not resume or config.lora_of(role) is not None):
        unused = require_weights(own.path, model, hf)
    transport = config.weights.transport
    plan = plan_role(
        role,
        config,
        experts=experts(hf),
        buffer=next(iter(stored_buffers(model)), ""),
        device=device,
        run_dir="",
        resume=resume,
        model=hf.to_dict(),
        layout=layout.name,
    )
    common = process_environment(
        cluster=config.cluster, device=device, transport="" if transport == AUTO else transport
    )
    environment = environment_of(plan.backend.name, plan.environment, cluster=config.cluster, common=common)
    return GroupPlan(
        role=evolve(plan, environment=environment, objective=plan_algorithm(config).objectives.get(role)),
        placement=arrange(
            {role: len(plan.assignments)},
            cpus=plan.resources.cpus,
            gpus=plan.resources.gpus,
            resources=config.cluster.resources,
        ),
        address=config.cluster.address,
        watchdog=config.cluster.watchdog,
        health_timeout=config.cluster.health_timeout,
        start_timeout=config.cluster.start_timeout,
        notices=(
            *ignored_tables(config),
            *([f"{table}.path: {unused}"] if unused else []),
            *unread_fields(config, {role: hf}),
            *without_adapters(config, {role: hf}),
            *([f"{config.train_table_of(role)}.layout: whole, because {layout.why}"] if layout.why else []),
            *(settled(asked, config) if device == "cuda" else ()),
        ),
    )


def with_sizes(
    config: Config, role: str, *, ranks: int = 0, backend: str = "", options: Mapping[str, Any] | None = None
) -> Config:
    """The config with another number of ranks of the role, another backend or other options; what is left out stays,
    but for the options of another backend."""
    choice = config.chosen_roles[role]
    if options is None and not backend:
        options = choice.options
    chosen = evolve(choice, ranks=ranks or choice.ranks, backend=backend or choice.backend, options=options)
    changed: Any = {role: chosen}  # of the role's own type
    return evolve(config, roles=evolve(config.roles, **changed))


# Of an algorithm's settings, those that a whole run alone has a use for: with engines, or with the samples of a step.
OF_SAMPLES = ("advantages", "postprocess", "kl_horizon", "old_weights")


def _alone(config: Config) -> Config:
    """The config without what only a whole run has: engines, prompts, extensions, a directory."""
    unset = AlgorithmConfig()
    return evolve(
        config,
        run=RunConfig(mode="train-only", seed=config.run.seed),
        algorithm=evolve(config.algorithm, **{name: getattr(unset, name) for name in OF_SAMPLES}),
        rollout=RolloutConfig(max_tokens=config.rollout.max_tokens),
        checkpoint=CheckpointConfig(every=0),
        extensions=(),
    )


def _part_of(resume: str, role: str) -> Path:
    """The directory of a role's part of a checkpoint. Raises ConfigError if it is none."""
    path = Path(resume)
    if (path / role).is_dir():
        raise ConfigError(f"resume: {resume!r} is a whole checkpoint; use {str(path / role)!r}, its {role}")
    if not path.is_dir():
        raise ConfigError(f"resume: no directory {resume!r}; use one that `save` has written")
    return path.absolute()
