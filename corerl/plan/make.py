"""Turn a config into a `Plan`: resolve and check everything about a run that can be known before its first process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve

from corerl.checkpoint.commit import NO_FAULTS, Faults
from corerl.cluster.arrangement import arrange
from corerl.config.load import as_config, recorded
from corerl.config.problems import Problems
from corerl.config.schema import AlgorithmConfig, CheckpointConfig, ClusterConfig, Config, RolloutConfig, RunConfig
from corerl.config.toml_text import to_plain, toml_value
from corerl.errors import ConfigError, Unsupported
from corerl.kinds import experts_of
from corerl.plan.algorithm import (
    against_algorithm,
    check_algorithm,
    notices_of_learning,
    notices_of_sampling,
    plan_algorithm,
)
from corerl.plan.check import contradictions, contradictions_of_a_group, require_no_code_of_a_model
from corerl.plan.data import (
    RolloutPlan,
    load_eval_sets,
    names_prompts,
    notices_of_data,
    plan_rollout,
    with_prompt_check,
)
from corerl.plan.models import (
    AS_ACTOR,
    RoleModel,
    build_models,
    check_files,
    kept_digests,
    load_configs,
    load_tokens,
    longest_sample,
    notices_of,
    require_weights,
    unpacked,
)
from corerl.plan.plan import GroupPlan, Plan, PlanReady, Setting, ask_extensions
from corerl.plan.processes import ProcessPlan, plan_processes
from corerl.plan.residency import against_taking_turns, device_memory, has_bfloat16, resolve_device
from corerl.plan.resolve import (
    ROLES,
    Plugins,
    absent_extensions,
    distributions_of,
    ignored_tables,
    plugins_of,
    resolve_tables,
    settle_algorithm,
    settle_extensions,
    with_extensions,
)
from corerl.plan.resume import Start, changed_settings, find_start
from corerl.plan.roles import plan_role, process_environment
from corerl.plan.settle import (
    BY_MEMORY,
    notices_of_choices,
    settle_adapters,
    with_absolute_paths,
    with_choices,
    with_other_sizes,
    with_vocabulary,
)
from corerl.plugin.origins import require_met
from corerl.plugin.spec import ACTOR, PlanAnswer


def make_plan(config: Config, damaged: Faults = NO_FAULTS, *, starting: bool = True) -> Plan:
    """Resolve and check everything that can be checked without a process.

    Raises UserError with a line for each problem of one round: plugins that cannot be loaded; settings that are wrong
    whatever the plugins do; models, data and functions; the checkpoint; and last what plugins cannot do. Unless a run
    is `starting`, its directory may already hold one: the config that a run has written stays valid. A run resumes by
    itself from none of the checkpoints that ranks have found to be `damaged`. Extensions are asked about the plan, and
    may want another one (`plan_ready`).
    """
    chosen: dict[str, Setting] = {}  # by extensions, where a plan had another value
    reasons: list[str] = []  # their notices
    while True:
        try:
            plan, ready = _plan_run(config, chosen, damaged, starting=starting)
            answers, wanted = ask_extensions(ready, chosen, run_dir=str(plan.start.run_dir))
            new = {key: each for key, each in wanted.items() if _at(ready.config, key) != each.value}
            if not new:
                return evolve(plan, notices=_notices(plan, ready, answers, reasons, {*chosen, *wanted}))
        except (ConfigError, Unsupported) as error:
            if not chosen:
                raise
            lines = [f"{key}: set to {toml_value(each.value)} by {each.by}" for key, each in chosen.items()]
            raise ConfigError("\n".join([error.message, *lines])) from error
        reasons += [line for each in answers if each.settings.keys() & new.keys() for line in each.notices]
        chosen |= new


def _notices(
    plan: Plan, ready: PlanReady, answers: Sequence[PlanAnswer], reasons: Sequence[str], decided: Collection[str]
) -> tuple[str, ...]:
    """Those of the plan, what was settled but for what extensions have `decided`, and what these say of it. Raises
    ConfigError if they refuse it."""
    problems = Problems()
    problems.add(*(line for each in answers for line in each.problems))
    problems.raise_all()
    lines = [*plan.notices]
    if ready.processes.device == "cuda":
        lines += notices_of_choices(ready.asked, ready.config, ready.plugins, decided=decided, advice=BY_MEMORY)
    return tuple(dict.fromkeys([*lines, *reasons, *(line for each in answers for line in each.notices)]))


def _at(config: Config, key: str) -> Any:
    """The plain value at a dotted key; None if there is none."""
    plain = to_plain(config)
    for name in key.split("."):
        plain = plain.get(name) if isinstance(plain, Mapping) else None
    return plain


def _resized(config: Config, overrides: Sequence[str]) -> Plan:
    """The plan of a run of this config with other sizes. Its state comes from the ranks that run: the checkpoint that
    these began with may be gone by now."""
    other = with_other_sizes(config, overrides)
    plan = make_plan(evolve(other, checkpoint=evolve(other.checkpoint, resume="never")), starting=False)
    resume = {"checkpoint": {**plan.record["checkpoint"], "resume": config.checkpoint.resume}}
    return evolve(plan, record={**plan.record, **resume}, resized=partial(_resized, other))


def _plan_run(
    given: Config, chosen: Mapping[str, Setting], damaged: Faults, *, starting: bool
) -> tuple[Plan, PlanReady]:
    """The plan of the `given` config with what extensions have chosen, and what these are asked about it."""
    overrides = [f"{key}={toml_value(each.value)}" for key, each in chosen.items()]
    config = settle_extensions(as_config(given, overrides))
    listed = len(config.chosen_extensions)
    config, plugins = _resolved(with_extensions(config), contradictions)
    configs = load_configs(config, config.chosen_roles)
    tokenizer = load_tokens(config, plugins, configs)
    config = with_vocabulary(config, configs, tokenizer)
    context = longest_sample(config, configs[ACTOR])
    rows = config.model.vocabulary or configs[ACTOR].get_text_config().vocab_size
    replay = config.algorithm.routing_replay

    problems = Problems()
    with problems.stage():
        models = build_models(config, plugins, configs)
    with problems.stage():
        rollout = plan_rollout(config, plugins, tokenizer, context=context, vocab_size=rows)
    with problems.stage():
        algorithm = plan_algorithm(config, plugins)
    if plugins.algorithm is not None:
        with problems.stage():
            check_algorithm(config, plugins.algorithm)
    if replay != "none" and experts_of(configs[ACTOR].to_dict()) <= 1:
        problems.add(f"algorithm.routing_replay: {replay!r}, but the model has no experts; set it to 'none'")
    with problems.stage():
        device = resolve_device(config.cluster.device, address=config.cluster.address)
        problems.add(*against_taking_turns(config, device))
    problems.raise_all()

    named, config = config, with_absolute_paths(config)  # only now: messages name files as the user does
    start = find_start(config, rollout.prompts, starting=starting, damaged=damaged)
    # Only now, because a resumed run holds out what its checkpoint did.
    with problems.stage():
        eval_sets, about_sets = load_eval_sets(named, rollout)
    about_files = list(_check_files(config, models, start, problems))
    problems.raise_all()

    asked, config = config, with_choices(config, plugins, device, bfloat16=has_bfloat16(config.cluster, device))
    processes = plan_processes(
        config,
        plugins,
        device=device,
        models=models,
        run_dir=start.run_dir,
        resume=start.resume,
        context_length=context,
        algorithm=algorithm,
    )
    rollout = evolve(with_prompt_check(rollout, config), settings=config.rollout)
    # Without extensions that join every run: where the record is loaded again, those join that are installed there.
    record = to_plain(recorded(evolve(config, extensions=config.chosen_extensions[:listed])))
    notices = [
        *(changed_settings(start.state["config"], record) if start.state and config.run.trains else ()),
        *ignored_tables(config),
        *absent_extensions(config),
        *start.data,
        *(notices_of_data(config, rollout, eval_sets, about_sets) if config.run.has_engines else ()),
        *about_files,
        *(line for model in models.values() for line in notices_of(model)),
        *notices_of_sampling(config),
        *((*notices_of_learning(config.algorithm), *unpacked(models)) if config.run.trains else ()),
    ]
    plan = Plan(
        title=_title(config, processes, rollout, plugins),
        run=config.run,
        start=start,
        algorithm=algorithm,
        processes=processes,
        rollout=rollout,
        cluster=config.cluster,
        weights=config.weights,
        checkpoint=config.checkpoint,
        eval=config.eval,
        eval_sets=eval_sets,
        extensions=config.chosen_extensions,
        resized=partial(_resized, given),
        record=record,
        kept=kept_digests(models),
        notices=tuple(notices),
    )
    ready = PlanReady(
        config=config,
        asked=asked,
        algorithm=algorithm,
        plugins=plugins,
        processes=processes,
        models=configs,
        built={role: each.built for role, each in models.items()},
        device_memory=device_memory(config.cluster) if device == "cuda" else 0,
        starting=starting,
    )
    return plan, ready


def _resolved(config: Config, against: Callable[[Config], list[str]]) -> tuple[Config, Plugins]:
    """The plugins of a config, and the config with what it leaves to them filled in, and with their options as they
    read them. Raises all problems together: of options, and what is `against` the settings."""
    require_no_code_of_a_model(config)  # first: plugins may be modules of the working directory
    plugins = plugins_of(config)
    require_met(distributions_of(config))
    problems = Problems()
    config = settle_adapters(settle_algorithm(config), problems)
    problems.add(*against(config), *against_algorithm(config, plugins))
    with problems.stage():
        config = resolve_tables(config)
    problems.raise_all()
    return config, plugins


def _check_files(config: Config, models: Mapping[str, RoleModel], start: Start, problems: Problems) -> Iterator[str]:
    """Notices about the files that a run starts from."""
    algorithm = config.algorithm
    # A resume still reads the KL reference from the model's files, if that is a snapshot.
    refers = bool(algorithm.kl_coef) and config.roles.reference is None
    refers = refers and not algorithm.reference and not algorithm.reference_every
    for role, model in models.items():
        part = start.resume / role if start.resume else None
        yield from check_files(model, part, setting="checkpoint.resume", refers=refers, problems=problems)
    if algorithm.reference and config.run.trains:
        with problems.stage("algorithm.reference"):
            actor = models[ACTOR]
            if unused := require_weights(algorithm.reference, actor.built, actor.hf, needs=AS_ACTOR):
                yield f"algorithm.reference: {unused}"


# ---- the ranks of one role -------------------------------------------------------------------------------------------


def plan_group(config: Config, role: str, *, resume: str) -> GroupPlan:
    """Resolve and check what a config says of a role alone, for a loop other than CoreRL's: of a run without samples.
    `resume` is what a `save` has written; "" starts from the model. Raises as `make_plan`."""
    if role not in ROLES:
        raise ConfigError(f"unknown role {role!r}; there are {', '.join(ROLES)}")
    config = _alone(config)
    if role not in config.chosen_roles:
        raise ConfigError(f"roles.{role}: missing; add it, such as roles.{role}.ranks=1, to start this role")
    config, plugins = _resolved(config, contradictions_of_a_group)
    device = resolve_device(config.cluster.device, address=config.cluster.address)
    asked = with_absolute_paths(config)
    config = with_choices(asked, plugins, device, bfloat16=has_bfloat16(config.cluster, device))
    models = build_models(config, plugins, load_configs(config, [role]))
    part = _part_of(resume, role, frozen=plugins.is_frozen(role))
    problems = Problems()
    about_files = list(check_files(models[role], part, setting="resume", refers=False, problems=problems))
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
            *(notices_of_choices(asked, config, plugins) if device == "cuda" else ()),
        ),
    )


# Of an algorithm's settings, those that a whole run alone has a use for: with engines, or with the samples of a step.
OF_SAMPLES = ("advantages", "postprocess", "kl_horizon", "old_weights", "dynamic_sampling", "dynamic_sampling_on")


def _alone(config: Config) -> Config:
    """The config without what only a whole run has: engines and taking turns with them, prompts, extensions, a
    directory."""
    algorithm, cluster = AlgorithmConfig(), ClusterConfig()
    turns = ("placement", "offload", "offload_kinds")
    return evolve(
        config,
        run=RunConfig(mode="train-only", seed=config.run.seed),
        cluster=evolve(config.cluster, **{name: getattr(cluster, name) for name in turns}),
        algorithm=evolve(config.algorithm, **{name: getattr(algorithm, name) for name in OF_SAMPLES}),
        rollout=RolloutConfig(max_tokens=config.rollout.max_tokens),
        checkpoint=CheckpointConfig(every=0),
        extensions=(),
    )


def _part_of(resume: str, role: str, *, frozen: bool) -> Path | None:
    """The directory of a role's part of a checkpoint, if it resumes. Raises ConfigError if it is none."""
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


def _title(config: Config, processes: ProcessPlan, rollout: RolloutPlan, plugins: Plugins) -> str:
    """A run in one line: the algorithm, what it learns from, the model, the processes and their device."""
    model = Path(config.model.path).name if config.model.path else f"{config.model.config['model_type']} from scratch"
    groups = []
    for role, plan in processes.roles.items():
        groups.append(
            f"{len(plan.assignments)} {plan.backend.name} rank{'s' * (len(plan.assignments) != 1)}"
            + (f" for the {role}" if role != ACTOR else "")
            + (" (LoRA)" if config.lora_of(role) else "")
        )
    if processes.engine is not None:
        engines = len(processes.engine.assignments)
        groups.append(f"{engines} {processes.engine.name} engine{'s' * (engines != 1)}")
    source = config.rollout.saved
    if config.run.has_engines:
        own = plugins.sampler.spec.prompts is not None and not names_prompts(config.data)
        shares = " + ".join(share.name for share in rollout.prompts.shares)
        source = shares or (config.rollout.sampler if own else config.data.source)
    return f"{config.algorithm.name} on {source}: {model}, {', '.join(groups)}, {processes.device}"
