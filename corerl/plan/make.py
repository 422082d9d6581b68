"""Turn a config into a `Plan`: resolve and check everything about a run that can be known before its first process."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from corerl.checkpoint.commit import NO_FAULTS, Faults
from corerl.config.load import as_config, recorded, to_plain
from corerl.config.problems import Problems
from corerl.config.schema import Config
from corerl.errors import ConfigError, Unsupported
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
    kept_digests,
    load_models,
    load_postprocess,
    load_sampled,
    longest_sample,
    prompt_check,
    require_positions,
    require_room_for_prompts,
)
from corerl.plan.lora import against_adapters, against_sending, check_adapters, named_for, settle_adapters
from corerl.plan.notices import (
    held_out_and_trained_on,
    kl_gradient,
    opened_reasoning,
    swapped_weights,
    title_of,
    unanswered,
    unapplied_sampling,
    unpacked,
)
from corerl.plan.plan import Plan, RolloutPlan
from corerl.plan.processes import ProcessPlan, plan_processes
from corerl.plan.ready import Decisions, PlanReady, decide
from corerl.plan.resolve import (
    absent_extensions,
    ignored_tables,
    load_plugins,
    settle_algorithm,
    settle_extensions,
    with_extensions,
)
from corerl.plan.run_dir import changed_settings
from corerl.plan.sampler import MakeSampler, plan_sampler
from corerl.plan.settle import BY_MEMORY, settled, with_absolute_paths, with_choices, with_vocabulary
from corerl.plan.sizes import with_other_sizes
from corerl.plan.start import find_start
from corerl.plan.user_code import require_no_code_of_a_model
from corerl.plugin.spec import ACTOR
from corerl.rollout.recorded import SavedRollouts


def make_plan(config: Config, damaged: Faults = NO_FAULTS, *, starting: bool = True) -> Plan:
    """Resolve and check everything that can be checked without a process.

    Raises UserError with a line per problem; checks that depend on a wrong setting are skipped. Unless a run is
    `starting`, its directory may already hold one: the config that a run has written stays valid. A run goes on by
    itself from none of the checkpoints that ranks have found to be `damaged`. Extensions are asked about the plan, and
    may want another one (`plan_ready`).
    """
    decisions = Decisions()
    while True:
        try:
            found = _planned(config, damaged, starting=starting, decisions=decisions)
        except (ConfigError, Unsupported) as error:
            if not decisions.settings:
                raise
            raise decisions.explained(error) from error
        if isinstance(found, Plan):
            return found
        decisions = found


def _planned(given: Config, damaged: Faults, *, starting: bool, decisions: Decisions) -> Plan | Decisions:
    """The plan with what extensions have decided; if there is more of that once they have been asked, that alone."""

    def resized(overrides: Sequence[str]) -> Plan:
        # State comes from the ranks that run, and the checkpoint that these began with may be gone by now.
        other = with_other_sizes(given, overrides)
        plan = make_plan(evolve(other, checkpoint=evolve(other.checkpoint, resume="never")), starting=False)
        resume = {"checkpoint": {**plan.record["checkpoint"], "resume": given.checkpoint.resume}}
        return evolve(plan, record={**plan.record, **resume}, resized=lambda more: resized([*overrides, *more]))

    problems = Problems()
    config = settle_extensions(as_config(given, decisions.overrides))
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
    postprocess = load_postprocess(config.rollout, problems)
    if config.rollout.saved and config.run.mode == "train-only":
        with problems.stage("rollout.saved"):
            SavedRollouts(config.rollout.saved, steps=config.run.steps, vocab_size=0)  # raises if there are too few
    context = longest_sample(config, models)
    require_positions(config, built, problems)
    require_room_for_prompts(config, context, problems)
    named = config
    config = with_absolute_paths(config)  # only now, because the checks above name files as the user does
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
    sampler: MakeSampler | None = None
    if problems.none_in("plugins.samplers"):
        with problems.stage("samplers"):
            sampler = plan_sampler(config)
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
    processes: ProcessPlan | None = None
    if problems.none_in("cluster.device", "algorithm's spec"):  # which says what the roles are
        if problems.none_in("plugins.backends"):
            config = with_choices(config, device, bfloat16=has_bfloat16(config.cluster, device))
        processes = plan_processes(
            config,
            problems,
            device=device,
            models=models,
            built=built,
            layouts=layouts,
            run_dir=start.run_dir,
            resume=start.resume if problems.none_in("checkpoint") else None,
            context_length=context,
            algorithm=algorithm,
        )
    problems.raise_all()

    # No problems, so nothing is missing.
    assert processes is not None and tokenizer is not None and algorithm is not None
    assert prompts is not None and reward is not None and params is not None and sampler is not None
    ready = PlanReady(
        config=config,
        asked=asked,
        algorithm=algorithm,
        processes=processes,
        models=models,
        built=built,
        device_memory=device_memory(config.cluster) if device == "cuda" else 0,
        starting=starting,
    )
    decisions = decide(ready, decisions, run_dir=str(start.run_dir))
    if not decisions.final:
        return decisions
    for line in decisions.problems:
        problems.add(line)
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
            sampler=sampler,
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
        kept=kept_digests(config, models),
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
            *named_for(config, models),
            *told_sampling(config),
            *(kl_gradient(config.algorithm) if config.run.trains else ()),
            *unapplied_sampling(config),
            *(unpacked(config, layouts) if config.run.trains else ()),
            *(settled(asked, config, decided=decisions.by, advice=BY_MEMORY) if device == "cuda" else ()),
            *(swapped_weights(algorithm, config.rollout.source) if config.run.trains else ()),
            *decisions.notices,
        ),
    )
