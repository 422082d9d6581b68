"""Turn a config into a `Plan`: resolve and check everything about a run that can be known before its first process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from corerl.config.load import as_config, recorded
from corerl.config.schema import Config
from corerl.config.toml_text import to_plain, toml_value
from corerl.errors import ConfigError, Unsupported
from corerl.plan.algorithm import against_algorithm, check_algorithm, plan_algorithm
from corerl.plan.check import Problems, contradictions, require_no_code_of_a_model, uneven
from corerl.plan.data import RolloutPlan, load_eval_sets, names_prompts, plan_rollout, with_prompt_check
from corerl.plan.models import (
    AS_ACTOR,
    RoleModel,
    against_replay,
    build_models,
    check_files,
    load_configs,
    load_tokens,
    longest_sample,
    require_weights,
)
from corerl.plan.plan import Plan, PlanReady, Setting, ask_extensions
from corerl.plan.processes import ProcessPlan, plan_processes
from corerl.plan.residency import against_taking_turns, has_bfloat16, resolve_device
from corerl.plan.resolve import (
    Plugins,
    distributions_of,
    ignored_tables,
    plugins_of,
    resolve_tables,
    settle_algorithm,
    settle_extensions,
    settle_reward,
    unshown,
    with_extensions,
)
from corerl.plan.resume import Start, find_start
from corerl.plan.settle import settle_adapters, with_absolute_paths, with_choices, with_vocabulary
from corerl.plugin.origins import require_met
from corerl.plugin.spec import ACTOR, PlanAnswer


def make_plan(config: Config, *, starting: bool = True) -> Plan:
    """Resolve and check everything that can be checked without a process.

    Raises UserError with a line for each problem of one round: plugins that cannot be loaded; settings that are wrong
    whatever the plugins do; models, data and functions; the checkpoint; and last what plugins cannot do. Unless a run
    is `starting`, its directory may already hold one: the config that a run has written stays valid. Extensions are
    asked about the plan, and may want another one (`plan_ready`).
    """
    chosen: dict[str, Setting] = {}  # by extensions, where a plan had another value
    reasons: list[str] = []  # their notices
    while True:
        try:
            plan, ready = _plan_run(config, chosen, starting=starting)
            answers, wanted = ask_extensions(ready, chosen, run_dir=str(plan.start.run_dir))
            new = {key: each for key, each in wanted.items() if _at(ready.config, key) != each.value}
            if not new:
                return evolve(plan, notices=_notices(plan, answers, reasons))
        except (ConfigError, Unsupported) as error:
            if not chosen:
                raise
            lines = [f"{key}: set to {toml_value(each.value)} by {each.by}" for key, each in chosen.items()]
            raise ConfigError("\n".join([error.message, *lines])) from error
        reasons += [line for each in answers if each.settings.keys() & new.keys() for line in each.notices]
        chosen |= new


def _notices(plan: Plan, answers: Sequence[PlanAnswer], reasons: Sequence[str]) -> tuple[str, ...]:
    """The notices of the plan and of the extensions. Raises ConfigError if an extension refuses the plan."""
    problems = Problems()
    problems.add(*(line for each in answers for line in each.problems))
    problems.raise_all()
    return tuple(dict.fromkeys([*plan.notices, *reasons, *(line for each in answers for line in each.notices)]))


def _at(config: Config, key: str) -> Any:
    """The plain value at a dotted key; None for a missing key."""
    plain = to_plain(config)
    for name in key.split("."):
        plain = plain.get(name) if isinstance(plain, Mapping) else None
    return plain


def _plan_run(given: Config, chosen: Mapping[str, Setting], *, starting: bool) -> tuple[Plan, PlanReady]:
    """The plan of the `given` config with what extensions have chosen, and what these are asked about it."""
    extended = settle_extensions(as_config(given, [f"{key}={toml_value(each.value)}" for key, each in chosen.items()]))
    filled, plugins = resolve_config(with_extensions(extended), contradictions)
    configs = load_configs(filled, filled.chosen_roles)
    tokenizer = load_tokens(filled, plugins, configs)
    resolved = with_vocabulary(filled, configs, tokenizer)
    context = longest_sample(resolved, configs[ACTOR])
    vocab_size = resolved.model.vocabulary or configs[ACTOR].get_text_config().vocab_size

    problems = Problems()
    with problems.stage():
        models = build_models(resolved, plugins, configs)
    with problems.stage():
        rollout = plan_rollout(resolved, plugins, tokenizer, context=context, vocab_size=vocab_size)
    with problems.stage():
        algorithm = plan_algorithm(resolved, plugins)
    if plugins.algorithm is not None:
        with problems.stage():
            check_algorithm(resolved, plugins.algorithm)
    problems.add(*against_replay(resolved, configs[ACTOR]))
    with problems.stage():
        device = resolve_device(resolved.cluster.device, address=resolved.cluster.address)
        problems.add(*against_taking_turns(resolved, device))
    problems.raise_all()

    absolute = with_absolute_paths(resolved)  # only now: messages name files as the user does
    start = find_start(absolute, rollout.prompts, starting=starting)
    # Only now, because a resumed run holds out what its checkpoint did.
    with problems.stage():
        eval_sets, about_sets = load_eval_sets(resolved, rollout)
    _check_files(absolute, models, start, problems)
    problems.raise_all()

    final = with_choices(absolute, plugins, device, bfloat16=has_bfloat16(absolute.cluster, device))
    processes = plan_processes(
        final,
        plugins,
        device=device,
        models=models,
        run_dir=str(start.run_dir),
        resume={role: str(start.resume / role) for role in final.chosen_roles} if start.resume else {},
        context_length=context,
        algorithm=algorithm,
    )
    if final.run.mode == "train":  # others train on nothing, or on batches of the size that the saving run chose
        trained = {role: own for role, own in processes.roles.items() if models[role].trained}
        problems.add(*uneven(final, {role: own.data_parallel for role, own in trained.items()}))
    problems.raise_all()
    rollout = evolve(with_prompt_check(rollout, final), settings=final.rollout)
    # Without extensions that join every run: where the record is loaded again, those join that are installed there.
    record = to_plain(recorded(evolve(final, extensions=final.chosen_extensions[: len(extended.chosen_extensions)])))
    about_data = [*start.data, *(rollout.prompts.notices if final.run.has_engines else ()), *about_sets]
    plan = Plan(
        title=_title(final, processes, rollout, plugins),
        run=final.run,
        start=start,
        algorithm=algorithm,
        processes=processes,
        rollout=rollout,
        cluster=final.cluster,
        weights=final.weights,
        checkpoint=final.checkpoint,
        eval=final.eval,
        eval_sets=eval_sets,
        extensions=final.chosen_extensions,
        given=given,
        record=record,
        notices=(*ignored_tables(final), *unshown(), *about_data),
    )
    return plan, PlanReady(
        config=final,
        asked=absolute,
        algorithm=algorithm,
        plugins=plugins,
        processes=processes,
        models=models,
        rollout=rollout,
        eval_sets=eval_sets,
        start=start,
        record=record,
        starting=starting,
    )


def resolve_config(config: Config, against: Callable[[Config], list[str]]) -> tuple[Config, Plugins]:
    """The plugins of a config, and the config with what it leaves to them filled in, and with their options as they
    read them. Raises all problems together: of options, and what is `against` the settings."""
    require_no_code_of_a_model(config)  # first: plugins may be modules of the working directory
    plugins = plugins_of(config)
    require_met(distributions_of(config))
    problems = Problems()
    config = settle_reward(settle_adapters(settle_algorithm(config), problems), plugins.sampler)
    problems.add(*against(config), *against_algorithm(config, plugins))
    with problems.stage():
        config = resolve_tables(config)
    problems.raise_all()
    return config, plugins


def _check_files(config: Config, models: Mapping[str, RoleModel], start: Start, problems: Problems) -> None:
    """Check the files that a run starts from."""
    algorithm = config.algorithm
    # A resume still reads the actor's KL reference from the model's files, if that is a snapshot.
    refers = config.run.trains and bool(algorithm.kl_coef) and config.roles.reference is None
    refers = refers and not algorithm.reference and not algorithm.reference_every
    for role, model in models.items():
        part, reads = start.resume / role if start.resume else None, refers and role == ACTOR
        check_files(model, part, setting="checkpoint.resume", refers=reads, problems=problems)
    if algorithm.reference and config.run.trains:
        with problems.stage("algorithm.reference"):
            actor = models[ACTOR]
            require_weights(algorithm.reference, actor.built, actor.hf, needs=AS_ACTOR)


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
        mixed = " + ".join(component.name for component in rollout.prompts.components)
        source = mixed or (config.rollout.sampler if own else config.data.source)
    return f"{config.algorithm.name} on {source}: {model}, {', '.join(groups)}, {processes.device}"
