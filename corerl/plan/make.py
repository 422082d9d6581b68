"""Turn a config into a `Plan`: resolve and check everything about a run that can be known before its first process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import evolve
from transformers import PreTrainedConfig, PreTrainedModel

from corerl.checkpoint.commit import NO_FAULTS, Faults
from corerl.config.load import recorded, to_plain
from corerl.config.problems import Problems
from corerl.config.schema import Config
from corerl.plan.algorithm import (
    AlgorithmPlan,
    check_algorithm,
    plan_algorithm,
    require_functions,
    told_sampling,
)
from corerl.plan.algorithm import contradictions as against_algorithm
from corerl.plan.check import contradictions
from corerl.plan.devices import against_taking_turns, device_memory, has_bfloat16, resolve_device
from corerl.plan.eval_sets import load_eval_sets
from corerl.plan.experts import against_aux_loss, unread_fields, without_adapters
from corerl.plan.inputs import (
    built_models,
    check_weights,
    choose_layouts,
    load_functions,
    load_models,
    load_sampled,
    longest_sample,
    prompt_check,
    require_positions,
    require_room_for_prompts,
)
from corerl.plan.lora import against_adapters, against_sending, check_adapters, settle_adapters
from corerl.plan.notices import (
    held_out_and_trained_on,
    kl_gradient,
    opened_reasoning,
    slow_paths,
    swapped_weights,
    title_of,
    unanswered,
    unapplied_sampling,
    unpacked,
)
from corerl.plan.plan import Plan, RolloutPlan
from corerl.plan.processes import ProcessPlan, plan_processes
from corerl.plan.resolve import (
    absent_extensions,
    ignored_tables,
    load_plugins,
    settle_algorithm,
    settle_extensions,
    with_extensions,
)
from corerl.plan.run_dir import changed_settings
from corerl.plan.settle import settled, with_absolute_paths, with_precisions, with_recomputation, with_vocabulary
from corerl.plan.sizes import with_other_sizes
from corerl.plan.start import find_start
from corerl.plan.user_code import require_no_code_of_a_model
from corerl.plugin.spec import ACTOR
from corerl.rollout.sources.recorded import SavedRollouts
from corerl.weights.transports import AUTO, transport_named

if TYPE_CHECKING:
    from corerl.plan.forecast import Forecast


def make_plan(config: Config, damaged: Faults = NO_FAULTS, *, starting: bool = True) -> Plan:
    """Resolve and check everything that can be checked without a process.

    Raises UserError with a line per problem; checks that depend on a wrong setting are skipped. Unless a run is
    `starting`, its directory may already hold one: the config that a run has written stays valid. A run goes on by
    itself from none of the checkpoints that ranks have found to be `damaged`.
    """

    def resized(overrides: Sequence[str]) -> Plan:
        # State comes from the ranks that run, and the checkpoint that these began with may be gone by now.
        other = with_other_sizes(given, overrides)
        plan = make_plan(evolve(other, checkpoint=evolve(other.checkpoint, resume="never")), starting=False)
        resume = {"checkpoint": {**plan.record["checkpoint"], "resume": given.checkpoint.resume}}
        return evolve(plan, record={**plan.record, **resume}, resized=lambda more: resized([*overrides, *more]))

    given, problems = config, Problems()
    config = settle_extensions(config)
    listed = len(config.chosen_extensions)
    config = with_extensions(config)
    with problems.stage("algorithm's spec", path="algorithm.name"):
        config = settle_algorithm(config)
    config = settle_adapters(config, problems)
    known = problems.none_in("algorithm's spec")
    for line in contradictions(config):
        if known or not line.startswith("algorithm."):  # what is unset is not known without
            problems.add(line)
    for line in against_sending(config):
        problems.add(line)
    if known and config.run.mode != "eval":
        for line in (*against_algorithm(config), *against_adapters(config)):
            problems.add(line)
    with problems.stage("user's code"):
        require_no_code_of_a_model(config)
    models, tokenizer = load_models(config, problems)
    if tokenizer is not None and models.keys() == config.chosen_roles.keys():
        with problems.stage("model.vocabulary"):
            config = with_vocabulary(config, models, tokenizer)
    built = built_models(config, models, problems)
    layouts = choose_layouts(config, built, problems)
    check_adapters(config, models, problems)
    for line in against_aux_loss(config, built):
        problems.add(line)
    prompts, reward, params = load_sampled(config, tokenizer, problems)
    function, postprocess = load_functions(config.rollout, problems)
    if config.rollout.saved and config.run.mode == "train-only":
        with problems.stage("rollout.saved"):
            SavedRollouts(config.rollout.saved, steps=config.run.steps, vocab_size=0)  # raises if there are too few
    context = longest_sample(config, models)
    require_positions(config, built, problems)
    require_room_for_prompts(config, context, problems)
    named = config
    config = with_absolute_paths(config)  # only now, because the checks above name files as the user does
    with problems.stage("weights.transport", path="weights.transport"):
        if config.weights.transport != AUTO:
            transport_named(config.weights.transport)  # raises if unknown
    start = find_start(config, prompts, problems, starting=starting, damaged=damaged)
    # Only now, because a resumed run holds out what its checkpoint did; with the paths that the user gave, for errors.
    eval_sets, about_sets = load_eval_sets(named, prompts, reward, tokenizer, context, problems)
    unused = check_weights(config, start.resume, models, built, problems)
    device = ""
    with problems.stage("cluster.device"):
        device = resolve_device(config.cluster.device, address=config.cluster.address)
    if problems.none_in("cluster"):
        for line in against_taking_turns(config, device):
            problems.add(line)
    config = load_plugins(config, problems)
    algorithm: AlgorithmPlan | None = None
    require_functions(config, problems)
    if problems.none_in("plugins.algorithms"):
        own = config.algorithm.loss  # else what is wrong with a loss is the algorithm's
        with problems.stage("algorithm.loss", path="algorithm.loss" if own else "algorithm.name"):
            algorithm = plan_algorithm(config)
        if config.run.mode != "eval":
            with problems.stage("algorithm.check"):
                check_algorithm(config)
    asked = config
    planned = functools.partial(
        plan_processes,
        device=device,
        models=models,
        built=built,
        layouts=layouts,
        run_dir=start.run_dir,
        resume=start.resume if problems.none_in("checkpoint") else None,
        context_length=context,
        algorithm=algorithm,
    )
    processes: ProcessPlan | None = None
    if problems.none_in("cluster.device", "algorithm's spec"):  # which says what the roles are
        if problems.none_in("plugins.backends"):
            config = with_precisions(config, device, bfloat16=has_bfloat16(config.cluster, device))
        processes = planned(config, problems)
    problems.raise_all()

    # No problems, so nothing is missing.
    assert processes is not None and tokenizer is not None and algorithm is not None
    assert prompts is not None and reward is not None and params is not None
    config, processes, memory = _fitted(config, asked, algorithm, processes, planned, problems, models, built)
    problems.raise_all()
    check = prompt_check(config, context, tokenizer, prompts, problems)  # last: it may take seconds
    problems.raise_all()
    # Without those that join every run: where the record is loaded again, those join that are installed there.
    record = to_plain(recorded(evolve(config, extensions=config.chosen_extensions[:listed])))
    return Plan(
        title=title_of(config, processes, prompts, layouts),
        run=config.run,
        start=start,
        algorithm=algorithm,
        processes=processes,
        rollout=RolloutPlan(
            settings=config.rollout,
            rewarding=config.reward,
            seed=config.run.seed,
            tokenizer=tokenizer,
            prompts=prompts,
            template_options=config.data.chat_template_options,
            check=check,
            context_length=context,
            reward=reward,
            params=params,
            attempts=config.algorithm.dynamic_sampling or 0,
            spread_on=config.algorithm.dynamic_sampling_on,
            function=function,
            postprocess=postprocess,
            vocab_size=config.model.vocabulary or models[ACTOR].get_text_config().vocab_size,
        ),
        cluster=config.cluster,
        weights=config.weights,
        checkpoint=config.checkpoint,
        eval=config.eval,
        eval_sets=eval_sets,
        extensions=config.chosen_extensions,
        resized=resized,
        record=record,
        memory=memory,
        notices=(
            *(changed_settings(start.state["config"], record) if start.state and config.run.trains else ()),
            *ignored_tables(config),
            *absent_extensions(config),
            *start.data,
            *(prompts.notices if config.run.samples else ()),
            *unanswered(config, prompts),
            *about_sets,
            *held_out_and_trained_on(config, prompts, eval_sets),
            *opened_reasoning(config, prompts, tokenizer),
            *unused,
            *unread_fields(config, models),
            *without_adapters(config, models),
            *told_sampling(config),
            *(kl_gradient(config.algorithm) if config.run.trains else ()),
            *unapplied_sampling(config),
            *(unpacked(config, layouts) if config.run.trains else ()),
            *(settled(asked, config) if device == "cuda" else ()),
            *(swapped_weights(algorithm, config.rollout.source) if config.run.trains else ()),
            *(slow_paths(asked, config, processes.roles, built) if config.run.trains else ()),
        ),
    )


def _fitted(
    config: Config,
    asked: Config,
    algorithm: AlgorithmPlan,
    processes: ProcessPlan,
    planned: Callable[[Config, Problems], ProcessPlan | None],
    problems: Problems,
    models: Mapping[str, PreTrainedConfig],
    built: Mapping[str, PreTrainedModel],
) -> tuple[Config, ProcessPlan, Forecast | None]:
    """The config with recomputation where it was left open and memory wants it, its plan, and the memory predicted of
    GPUs. On this machine's, a role that cannot be trained is a problem."""
    if processes.device != "cuda" or not config.run.trains:
        return with_recomputation(config, {}), processes, None
    from corerl.plan.forecast import Forecaster  # slow to import: takes seconds

    # Not by the model's positions, which are often many times as many as samples ever have tokens.
    longest = config.rollout.context_length
    forecaster = Forecaster(
        config=config, asked=asked, algorithm=algorithm, plan=processes, models=models, built=built, longest=longest
    )
    memory, there = forecaster.forecast(), device_memory(config.cluster)
    full = with_recomputation(config, {role: memory.tight(role, there=there) for role in processes.roles})
    config = with_recomputation(config, {})
    if full != config and (again := planned(full, Problems())) is not None:  # None: a backend cannot, as configured
        config, processes = full, again
        forecaster = evolve(forecaster, config=config, plan=processes)
        memory = forecaster.forecast()
    for line in forecaster.too_large(memory, there=there) if there else ():
        problems.add(line)
    return config, processes, memory
