"""Plan the ranks of one role, for a training loop other than CoreRL's."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from corerl.cluster.arrangement import arrange
from corerl.config.problems import Problems
from corerl.config.schema import AlgorithmConfig, CheckpointConfig, ClusterConfig, Config, RolloutConfig, RunConfig
from corerl.errors import ConfigError
from corerl.plan.algorithm import plan_algorithm
from corerl.plan.check import contradictions_of_a_group
from corerl.plan.make import resolve_config
from corerl.plan.models import build_models, check_files, load_configs, notices_of, unpacked
from corerl.plan.plan import GroupPlan
from corerl.plan.residency import has_bfloat16, resolve_device
from corerl.plan.resolve import ROLES, ignored_tables
from corerl.plan.roles import plan_role, process_environment
from corerl.plan.settle import notices_of_choices, with_absolute_paths, with_choices


def plan_group(config: Config, role: str, *, resume: str) -> GroupPlan:
    """Resolve and check what a config says of a role alone, for a loop other than CoreRL's: of a run without samples.
    `resume` is what a `save` has written; "" starts from the model. Raises as `make_plan`."""
    if role not in ROLES:
        raise ConfigError(f"unknown role {role!r}; there are {', '.join(ROLES)}")
    config = _of_a_group(config)
    if role not in config.chosen_roles:
        raise ConfigError(f"roles.{role}: missing; add it, such as roles.{role}.ranks=1, to start this role")
    config, plugins = resolve_config(config, contradictions_of_a_group)
    device = resolve_device(config.cluster.device, address=config.cluster.address)
    absolute = with_absolute_paths(config)
    config = with_choices(absolute, plugins, device, bfloat16=has_bfloat16(config.cluster, device))
    models = build_models(config, plugins, load_configs(config, [role]))
    checkpoint = _checkpoint_of(resume, role, frozen=plugins.is_frozen(role))
    problems = Problems()
    about_files = list(check_files(models[role], checkpoint, setting="resume", refers=False, problems=problems))
    problems.raise_all()
    plan = plan_role(
        role,
        config,
        plugins,
        device=device,
        resume=resume,
        model=models[role],
        common=process_environment(config.cluster, device=device, transport=plugins.transport),
    )
    return GroupPlan(
        role=evolve(plan, objective=plan_algorithm(config, plugins).objectives.get(role)),
        placement=arrange(
            {role: len(plan.assignments)},
            cpus=plan.resources.cpus,
            gpus=plan.resources.gpus,
            resources=config.cluster.resources,
        ),
        cluster=config.cluster,
        notices=(
            *ignored_tables(config),
            *about_files,
            *notices_of(models[role]),
            *unpacked(models),
            *(notices_of_choices(absolute, config, plugins) if device == "cuda" else ()),
        ),
    )


# Settings of an algorithm that only a whole run uses: they are about engines, or about all samples of a step.
RUN_SETTINGS = ("advantages", "postprocess", "kl_horizon", "old_weights", "dynamic_sampling", "dynamic_sampling_on")


def _of_a_group(config: Config) -> Config:
    """The config without what only a whole run has: engines and taking turns with them, prompts, extensions, a run
    directory."""
    algorithm, cluster = AlgorithmConfig(), ClusterConfig()
    turns = ("placement", "offload", "offload_kinds")
    return evolve(
        config,
        run=RunConfig(mode="train-only", seed=config.run.seed),
        cluster=evolve(config.cluster, **{name: getattr(cluster, name) for name in turns}),
        algorithm=evolve(config.algorithm, **{name: getattr(algorithm, name) for name in RUN_SETTINGS}),
        rollout=RolloutConfig(max_tokens=config.rollout.max_tokens),
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
