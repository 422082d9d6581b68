"""Plan the ranks of one role, alone or with engines, for a training loop other than CoreRL's."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from corerl.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    RolesConfig,
    RolloutConfig,
    RunConfig,
)
from corerl.errors import ConfigError
from corerl.plan.algorithm import plan_algorithm
from corerl.plan.check import Problems, contradictions_of_a_group
from corerl.plan.make import resolve_config
from corerl.plan.models import build_models, check_files, load_configs, longest_sample
from corerl.plan.plan import GroupPlan
from corerl.plan.processes import plan_processes
from corerl.plan.residency import has_bfloat16, resolve_device
from corerl.plan.resolve import ROLES, ignored_tables
from corerl.plan.settle import with_absolute_paths, with_choices


def plan_group(config: Config, role: str, *, resume: str, engines_in: Path | None = None) -> GroupPlan:
    """Resolve and check what a config says of a role alone, for a loop other than CoreRL's: of a run without samples,
    or, for the actor, of its engines too, which write into the directory `engines_in`. `resume` is what a `save` has
    written; "" starts from the model. Raises as `make_plan`."""
    if role not in ROLES:
        raise ConfigError(f"unknown role {role!r}; there are {', '.join(ROLES)}")
    config = _of_a_group(config, engines=engines_in is not None)
    if role not in config.chosen_roles:
        raise ConfigError(f"roles.{role}: missing; add it, such as roles.{role}.ranks=1, to start this role")
    config, plugins = resolve_config(config, contradictions_of_a_group)
    device = resolve_device(config.cluster.device, address=config.cluster.address)
    config = with_choices(with_absolute_paths(config), plugins, device, bfloat16=has_bfloat16(config.cluster, device))
    configs = load_configs(config, [role])
    models = build_models(config, plugins, configs)
    checkpoint = _checkpoint_of(resume, role, frozen=plugins.is_frozen(role))
    problems = Problems()
    check_files(models[role], checkpoint, setting="resume", refers=False, problems=problems)
    problems.raise_all()
    context = longest_sample(config, configs[role])
    processes = plan_processes(
        config if engines_in is None else evolve(config, roles=RolesConfig(actor=config.roles.actor)),
        plugins,
        device=device,
        models=models,
        run_dir="" if engines_in is None else str(engines_in),
        resume={role: str(checkpoint or "")},
        context_length=context,
    )
    plan = evolve(processes.roles[role], objective=plan_algorithm(config, plugins).objectives.get(role))
    return GroupPlan(
        role=plan,
        processes=evolve(processes, roles={role: plan}),
        cluster=config.cluster,
        weights=config.weights,
        rollout=config.rollout,
        context_length=context,
        notices=tuple(ignored_tables(config)),
    )


# Settings of an algorithm that only a whole run uses: they are about engines, or about all samples of a step.
RUN_SETTINGS = ("advantages", "postprocess", "dynamic_sampling", "dynamic_sampling_on")


OF_ENGINES = ("engine", "replicas", "max_tokens", "context_length", "restarts")  # settings of [rollout]


def _of_a_group(config: Config, *, engines: bool) -> Config:
    """The config without what only a whole run has: prompts, a schedule, extensions, a run directory; and, without
    `engines`, what is about these and taking turns with them."""
    algorithm, cluster = AlgorithmConfig(), ClusterConfig()
    kept = OF_ENGINES if engines else ("max_tokens",)
    turns = () if engines else ("placement", "offload")
    return evolve(
        config,
        run=RunConfig(mode="train" if engines else "train-only", seed=config.run.seed),
        cluster=evolve(config.cluster, **{name: getattr(cluster, name) for name in turns}),
        algorithm=evolve(config.algorithm, **{name: getattr(algorithm, name) for name in RUN_SETTINGS}),
        rollout=RolloutConfig(**{name: getattr(config.rollout, name) for name in kept}),
        weights=evolve(config.weights, every=1),
        checkpoint=CheckpointConfig(every=0),
        extensions=(),
    )


def _checkpoint_of(resume: str, role: str, *, frozen: bool) -> Path | None:
    """The directory of a checkpoint that holds the role alone; None if the role does not resume. Raises ConfigError if
    `resume` names anything else."""
    path = Path(resume)
    if not resume:
        return None
    if frozen:
        raise ConfigError(f"resume: {resume!r}, but the {role} is frozen, and no checkpoint holds it; remove it")
    if (path / role).is_dir():
        raise ConfigError(f"resume: {resume!r} is a whole checkpoint; use {str(path / role)!r}, its {role}")
    if not path.is_dir():
        raise ConfigError(f"resume: no directory {resume!r}; use one that `save` has written")
    return path.absolute()
