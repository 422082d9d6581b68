"""Turn a config into a `Plan`: resolve and check everything about a run that can be known before its first process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from corerl.checkpoint.commit import NO_FAULTS, Faults
from corerl.cluster.arrangement import arrange
from corerl.config.load import as_config, recorded
from corerl.config.problems import Problems
from corerl.config.schema import AlgorithmConfig, CheckpointConfig, ClusterConfig, Config, RolloutConfig, RunConfig
from corerl.config.toml_text import to_plain
from corerl.errors import ConfigError, Unsupported
from corerl.plan.algorithm import (
    AlgorithmPlan,
    check_algorithm,
    notices_of_learning,
    notices_of_sampling,
    plan_algorithm,
    require_functions,
)
from corerl.plan.algorithm import contradictions as against_algorithm
from corerl.plan.check import contradictions, contradictions_of_a_group, require_no_code_of_a_model
from corerl.plan.data import (
    MakeSampler,
    Sampled,
    against_lengths,
    load_eval_sets,
    load_sampled,
    names_prompts,
    notices_of_data,
    plan_sampler,
    prompt_check,
)
from corerl.plan.models import (
    RoleModel,
    against_replay,
    build,
    check_adapters,
    check_files,
    check_reference,
    kept_digests,
    load_models,
    load_tokens,
    longest_sample,
    notices_of,
    unpacked,
)
from corerl.plan.plan import Answers, GroupPlan, Plan, PlanReady, RolloutPlan, ask_extensions
from corerl.plan.processes import ProcessPlan, plan_processes, process_environment, with_environment
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
from corerl.plan.roles import plan_role
from corerl.plan.settle import (
    BY_MEMORY,
    settle_adapters,
    settled,
    with_absolute_paths,
    with_choices,
    with_other_sizes,
    with_vocabulary,
)
from corerl.plugin.origins import require_met
from corerl.plugin.spec import ACTOR
from corerl.rollout.evaluation import EvalSet


@frozen(kw_only=True)
class _Planned:
    """A run whose processes are planned, and what extensions have answered to that."""

    ready: PlanReady
    answers: Answers
    listed: int  # of the config's extensions, those that it lists
    device: str
    models: Mapping[str, RoleModel]
    sampled: Sampled
    sampler: MakeSampler
    context: int  # maximum tokens of a sample; 0: unlimited
    start: Start
    eval_sets: Sequence[EvalSet]
    about_sets: Sequence[str]  # notices
    about_files: Sequence[str]  # notices


def make_plan(config: Config, damaged: Faults = NO_FAULTS, *, starting: bool = True) -> Plan:
    """Resolve and check everything that can be checked without a process.

    Raises UserError with a line per problem; checks that depend on a wrong setting are skipped. Unless a run is
    `starting`, its directory may already hold one: the config that a run has written stays valid. A run resumes by
    itself from none of the checkpoints that ranks have found to be `damaged`. Extensions are asked about the plan, and
    may want another one (`plan_ready`).
    """
    answers = Answers()
    while True:
        try:
            planned = _plan_run(as_config(config, answers.overrides), damaged, answers, starting=starting)
            if planned.answers.settings == answers.settings:
                return _finished(planned, config)
        except (ConfigError, Unsupported) as error:
            if not answers.settings:
                raise
            raise answers.explained(error) from error
        answers = planned.answers


def _resized(config: Config, overrides: Sequence[str]) -> Plan:
    """The plan of a run of this config with other sizes. Its state comes from the ranks that run: the checkpoint that
    these began with may be gone by now."""
    other = with_other_sizes(config, overrides)
    plan = make_plan(evolve(other, checkpoint=evolve(other.checkpoint, resume="never")), starting=False)
    resume = {"checkpoint": {**plan.record["checkpoint"], "resume": config.checkpoint.resume}}
    return evolve(plan, record={**plan.record, **resume}, resized=partial(_resized, other))


def _plan_run(config: Config, damaged: Faults, before: Answers, *, starting: bool) -> _Planned:
    """Plan a run, and ask the extensions about the plan. Raises UserError with all problems."""
    problems = Problems()
    config = settle_extensions(config)
    listed = len(config.chosen_extensions)
    config, plugins = _settled(with_extensions(config), problems)
    _check(contradictions(config), config, plugins, problems)
    models = load_models(config, list(config.chosen_roles), plugins, problems)
    tokenizer = load_tokens(config.model, models, problems)
    if ACTOR in models:
        problems.add(*against_replay(config.algorithm.routing_replay, models[ACTOR]))
    if tokenizer is not None and models.keys() == config.chosen_roles.keys():
        with problems.stage("model.vocabulary"):
            config = with_vocabulary(config, {role: each.hf for role, each in models.items()}, tokenizer)
    models = _built(models, config, plugins, problems)
    sampled = load_sampled(config, tokenizer, plugins.sampler, problems)
    context = longest_sample(config, models.get(ACTOR))
    problems.add(*against_lengths(config, context))
    named, config = config, with_absolute_paths(config)  # only now: messages name files as the user does
    start = find_start(config, sampled.prompts, problems, starting=starting, damaged=damaged)
    # Only now, because a resumed run holds out what its checkpoint did.
    eval_sets, about_sets = load_eval_sets(named, sampled, context, problems)
    about_files = list(_check_files(config, models, start, problems))
    device = _device(config, problems)
    sampler: MakeSampler | None = None
    if plugins.sampler is not None and problems.none_in("plugins.samplers"):
        with problems.stage("samplers"):
            sampler = plan_sampler(config, plugins.sampler)
    algorithm = _algorithm(config, plugins, problems)
    asked, processes = config, None
    if _is_known(config, plugins) and problems.none_in("cluster.device"):
        config = _with_choices(config, plugins, device, problems)
        processes = plan_processes(
            config,
            plugins,
            problems,
            device=device,
            models=models,
            run_dir=start.run_dir,
            resume=start.resume if problems.none_in("checkpoint") else None,
            context_length=context,
            algorithm=algorithm,
        )
    problems.raise_all()
    assert processes is not None and algorithm is not None and sampler is not None  # no problems: nothing is missing
    ready = PlanReady(
        config=config,
        asked=asked,
        algorithm=algorithm,
        plugins=plugins,
        processes=processes,
        models={role: each.hf for role, each in models.items()},
        built={role: each.built for role, each in models.items() if each.built is not None},
        device_memory=device_memory(config.cluster) if device == "cuda" else 0,
        starting=starting,
    )
    return _Planned(
        ready=ready,
        answers=ask_extensions(ready, before, run_dir=str(start.run_dir)),
        listed=listed,
        device=device,
        models=models,
        sampled=sampled,
        sampler=sampler,
        context=context,
        start=start,
        eval_sets=eval_sets,
        about_sets=about_sets,
        about_files=about_files,
    )


def _finished(planned: _Planned, given: Config) -> Plan:
    """The plan of the `given` config, with what extensions say of it."""
    problems = Problems()
    problems.add(*planned.answers.problems)
    problems.raise_all()
    ready, sampled, models = planned.ready, planned.sampled, planned.models
    config = ready.config
    # No problems, so nothing is missing.
    assert sampled.tokenizer is not None and sampled.prompts is not None
    check = prompt_check(config, planned.context, sampled.tokenizer, sampled.prompts, problems)  # takes seconds
    problems.raise_all()
    # Without extensions that join every run: where the record is loaded again, those join that are installed there.
    record = to_plain(recorded(evolve(config, extensions=config.chosen_extensions[: planned.listed])))
    assert sampled.reward is not None and sampled.params is not None
    return Plan(
        title=_title(config, ready.processes, sampled, models, ready.plugins),
        run=config.run,
        start=planned.start,
        algorithm=ready.algorithm,
        processes=ready.processes,
        rollout=RolloutPlan(
            settings=config.rollout,
            rewarding=config.reward,
            seed=config.run.seed,
            tokenizer=sampled.tokenizer,
            prompts=sampled.prompts,
            template_options=config.data.chat_template_options,
            check=check,
            context_length=planned.context,
            reward=sampled.reward,
            params=sampled.params,
            attempts=config.algorithm.dynamic_sampling or 0,
            spread_on=config.algorithm.dynamic_sampling_on,
            sampler=planned.sampler,
            postprocess=sampled.postprocess,
            vocab_size=config.model.vocabulary or models[ACTOR].hf.get_text_config().vocab_size,
        ),
        cluster=config.cluster,
        weights=config.weights,
        checkpoint=config.checkpoint,
        eval=config.eval,
        eval_sets=planned.eval_sets,
        extensions=config.chosen_extensions,
        resized=partial(_resized, given),
        record=record,
        kept=kept_digests(models),
        notices=tuple(dict.fromkeys(_notices(planned, record))),
    )


def _notices(planned: _Planned, record: Mapping[str, Any]) -> Iterator[str]:
    ready, start, answers = planned.ready, planned.start, planned.answers
    config = ready.config
    if start.state and config.run.trains:
        yield from changed_settings(start.state["config"], record)
    yield from (*ignored_tables(config), *absent_extensions(config), *start.data)
    if config.run.samples:
        yield from notices_of_data(config, planned.sampled, planned.eval_sets, planned.about_sets)
    yield from planned.about_files
    for model in planned.models.values():
        yield from notices_of(model)
    yield from notices_of_sampling(config)
    if config.run.trains:
        yield from (*notices_of_learning(config, ready.algorithm), *unpacked(planned.models))
    if planned.device == "cuda":
        yield from settled(ready.asked, config, ready.plugins, decided=answers.by, advice=BY_MEMORY)
    yield from (*answers.reasons, *answers.remarks)


# ---- steps, each of which adds what is wrong to the problems ---------------------------------------------------------


def _settled(config: Config, problems: Problems) -> tuple[Config, Plugins]:
    """Load the plugins, and fill in what the config leaves to them."""
    require_no_code_of_a_model(config)  # first: plugins may be modules of the working directory
    plugins = plugins_of(config, problems)
    with problems.stage("versions"):
        require_met(distributions_of(config))
    config = resolve_tables(config, problems)
    return settle_adapters(settle_algorithm(config, plugins), problems), plugins


def _is_known(config: Config, plugins: Plugins) -> bool:
    """Whether it is known what the algorithm says, and so what the roles are."""
    return plugins.algorithm is not None or config.run.mode == "eval"


def _check(lines: Iterable[str], config: Config, plugins: Plugins, problems: Problems) -> None:
    known = _is_known(config, plugins)
    problems.add(*(line for line in lines if known or not line.startswith("algorithm.")))  # whose defaults are missing
    if plugins.algorithm is not None:
        problems.add(*against_algorithm(config, plugins))


def _built(models: dict[str, RoleModel], config: Config, plugins: Plugins, problems: Problems) -> dict[str, RoleModel]:
    """The models on meta, unless it is not known what they are for."""
    if not _is_known(config, plugins):
        return models
    found = {}
    for role, model in models.items():
        found[role] = build(
            model,
            elsewhere=bool(config.cluster.address),
            wanted=config.rollout.context_length,
            streamed=config.rollout.source == "streamed",
            problems=problems,
        )
        check_adapters(found[role], problems)
    return found


def _check_files(config: Config, models: Mapping[str, RoleModel], start: Start, problems: Problems) -> Iterator[str]:
    """Notices about the files that a run starts from."""
    algorithm = config.algorithm
    # A resume still reads the KL reference from the model's files, if that is a snapshot.
    refers = bool(algorithm.kl_coef) and config.roles.reference is None
    refers = refers and not algorithm.reference and not algorithm.reference_every
    for role, model in models.items():
        part = start.resume / role if start.resume else None
        yield from check_files(model, part, setting="checkpoint.resume", refers=refers, problems=problems)
    if algorithm.reference and config.run.trains and ACTOR in models:
        yield from check_reference(algorithm.reference, models[ACTOR], problems)


def _device(config: Config, problems: Problems) -> str:
    """The device of ranks and engines; "" if there is none."""
    device = ""
    with problems.stage("cluster.device"):
        device = resolve_device(config.cluster.device, address=config.cluster.address)
    if problems.none_in("cluster"):
        problems.add(*against_taking_turns(config, device))
    return device


def _algorithm(config: Config, plugins: Plugins, problems: Problems) -> AlgorithmPlan | None:
    require_functions(config, problems)
    algorithm: AlgorithmPlan | None = None
    if problems.none_in("plugins.algorithms"):
        own = config.algorithm.loss  # else what is wrong with a loss is the algorithm's
        with problems.stage("algorithm.loss", path="algorithm.loss" if own else "algorithm.name"):
            algorithm = plan_algorithm(config, plugins)
        if plugins.algorithm is not None:
            with problems.stage("algorithm.check"):
                check_algorithm(config, plugins)
    return algorithm


def _with_choices(config: Config, plugins: Plugins, device: str, problems: Problems) -> Config:
    if not problems.none_in("plugins.backends"):
        return config
    return with_choices(config, plugins, device, bfloat16=has_bfloat16(config.cluster, device))


# ---- the ranks of one role -------------------------------------------------------------------------------------------


def plan_group(config: Config, role: str, *, resume: str) -> GroupPlan:
    """Resolve and check what a config says of a role alone, for a loop other than CoreRL's: of a run without samples.
    `resume` is what a `save` has written; "" starts from the model. Raises as `make_plan`."""
    if role not in ROLES:
        raise ConfigError(f"unknown role {role!r}; there are {', '.join(ROLES)}")
    problems = Problems()
    config, plugins = _settled(_alone(config), problems)
    _check(contradictions_of_a_group(config), config, plugins, problems)
    if role not in config.chosen_roles:
        problems.add(f"roles.{role}: missing; add it, such as roles.{role}.ranks=1, to start this role")
    device = _device(config, problems)
    problems.raise_all()
    asked = with_absolute_paths(config)
    config = _with_choices(asked, plugins, device, problems)
    models = _built(load_models(config, [role], plugins, problems), config, plugins, problems)
    problems.raise_all()
    model, part = models[role], _part_of(resume, role, frozen=plugins.is_frozen(role))
    about_files = list(check_files(model, part, setting="resume", refers=False, problems=problems))
    problems.raise_all()
    plan = plan_role(role, config, plugins, device=device, resume=resume, model=model)
    plan = evolve(plan, objective=plan_algorithm(config, plugins).objectives.get(role))
    common = process_environment(config.cluster, device=device, transport=plugins.transport)
    return GroupPlan(
        role=with_environment(plan, config.cluster, common),
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
            *notices_of(model),
            *unpacked(models),
            *(settled(asked, config, plugins) if device == "cuda" else ()),
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


def _title(
    config: Config, processes: ProcessPlan, sampled: Sampled, models: Mapping[str, RoleModel], plugins: Plugins
) -> str:
    """A run in one line: the algorithm, what it learns from, the model, the processes and their device."""
    model = Path(config.model.path).name if config.model.path else f"{config.model.config['model_type']} from scratch"
    groups = []
    for role, plan in processes.roles.items():
        layout = models[role].layout
        groups.append(
            f"{len(plan.assignments)} {plan.backend.name} rank{'s' * (len(plan.assignments) != 1)}"
            + (f" for the {role}" if role != ACTOR else "")
            + (" (LoRA)" if config.lora_of(role) else "")
            + (" (whole)" if config.run.trains and layout is not None and layout.name == "whole" else "")
        )
    if processes.engine is not None:
        engines = len(processes.engine.assignments)
        groups.append(f"{engines} {processes.engine.name} engine{'s' * (engines != 1)}")
    source = config.rollout.saved
    if config.run.samples:
        assert plugins.sampler is not None and sampled.prompts is not None
        own = plugins.sampler.spec.prompts is not None and not names_prompts(config.data)
        shares = " + ".join(share.name for share in sampled.prompts.shares)
        source = shares or (config.rollout.sampler if own else config.data.source)
    return f"{config.algorithm.name} on {source}: {model}, {', '.join(groups)}, {processes.device}"
