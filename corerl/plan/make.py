"""Turn a config into a `Plan`: resolve and check everything about a run that can be known before its first process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve

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
from corerl.plan.resume import changed_settings, find_start
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
from corerl.plugin.requirements import require_met
from corerl.plugin.spec import ACTOR


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
            planner = _Planner(as_config(config, answers.overrides), starting=starting)
            planner.plan_run(damaged, answers)
            if planner.answers.settings == answers.settings:
                return planner.finish(config)
        except (ConfigError, Unsupported) as error:
            if not answers.settings:
                raise
            raise answers.explained(error) from error
        answers = planner.answers


def _resized(config: Config, overrides: Sequence[str]) -> Plan:
    """The plan of a run of this config with other sizes. Its state comes from the ranks that run: the checkpoint that
    these began with may be gone by now."""
    other = with_other_sizes(config, overrides)
    plan = make_plan(evolve(other, checkpoint=evolve(other.checkpoint, resume="never")), starting=False)
    resume = {"checkpoint": {**plan.record["checkpoint"], "resume": config.checkpoint.resume}}
    return evolve(plan, record={**plan.record, **resume}, resized=partial(_resized, other))


def plan_group(config: Config, role: str, *, resume: str) -> GroupPlan:
    """Resolve and check what a config says of a role alone, for a loop other than CoreRL's: of a run without samples.
    `resume` is what a `save` has written; "" starts from the model. Raises as `make_plan`."""
    if role not in ROLES:
        raise ConfigError(f"unknown role {role!r}; there are {', '.join(ROLES)}")
    return _Planner(_alone(config), starting=False).plan_group(role, resume)


class _Planner:
    """Plans one config, step by step: each settles a part of it, and adds to what is known and to the problems."""

    def __init__(self, config: Config, *, starting: bool) -> None:
        self.config = config
        self.starting = starting
        self.problems = Problems()
        self.plugins = Plugins()
        self.models: dict[str, RoleModel] = {}
        self.device = ""
        self.notices: list[str] = []

    # ---- a run -------------------------------------------------------------------------------------------------------

    def plan_run(self, damaged: Faults, before: Answers) -> None:
        """Plan a run, and ask the extensions about the plan. Raises UserError with all problems."""
        config = settle_extensions(self.config)
        self.listed = len(config.chosen_extensions)
        self.config = with_extensions(config)
        self._settle()
        self._check(contradictions(self.config))
        self._load_models()
        self._load_data()
        self._find_start(damaged)
        self._resolve_device()
        algorithm = self._plan_algorithm()
        asked = self.config
        processes = self._plan_processes(algorithm)
        self.problems.raise_all()
        assert processes is not None and algorithm is not None  # no problems, so nothing is missing
        self.ready = PlanReady(
            config=self.config,
            asked=asked,
            algorithm=algorithm,
            plugins=self.plugins,
            processes=processes,
            models={role: each.hf for role, each in self.models.items()},
            built={role: each.built for role, each in self.models.items() if each.built is not None},
            device_memory=device_memory(self.config.cluster) if self.device == "cuda" else 0,
            starting=self.starting,
        )
        self.answers = ask_extensions(self.ready, before, run_dir=str(self.start.run_dir))

    def _settle(self) -> None:
        """Load the plugins, and fill in what the config leaves to them."""
        require_no_code_of_a_model(self.config)  # first: plugins may be modules of the working directory
        self.plugins = plugins_of(self.config, self.problems)
        with self.problems.stage("versions"):
            require_met(distributions_of(self.config))
        self.config = resolve_tables(self.config, self.problems)
        self.config = settle_adapters(settle_algorithm(self.config, self.plugins), self.problems)

    @property
    def _known(self) -> bool:
        """Whether it is known what the algorithm says, and so what the roles are."""
        return self.plugins.algorithm is not None or self.config.run.mode == "eval"

    def _check(self, lines: Iterable[str]) -> None:
        for line in lines:
            if self._known or not line.startswith("algorithm."):  # what is unset is not known without
                self.problems.add(line)
        if self.plugins.algorithm is not None:
            self._add(against_algorithm(self.config, self.plugins))

    def _add(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.problems.add(line)

    def _load_models(self) -> None:
        config, problems = self.config, self.problems
        models = load_models(config, list(config.chosen_roles), self.plugins, problems)
        self.tokenizer = load_tokens(config.model, models, problems)
        if ACTOR in models:
            self._add(against_replay(config.algorithm.routing_replay, models[ACTOR]))
        if self.tokenizer is not None and models.keys() == config.chosen_roles.keys():
            with problems.stage("model.vocabulary"):
                configs = {role: each.hf for role, each in models.items()}
                self.config = with_vocabulary(config, configs, self.tokenizer)
        self._build(models)

    def _build(self, models: Mapping[str, RoleModel]) -> None:
        self.models = dict(models)
        rollout, cluster = self.config.rollout, self.config.cluster
        for role, model in models.items() if self._known else ():
            self.models[role] = build(
                model,
                elsewhere=bool(cluster.address),
                wanted=rollout.context_length,
                streamed=rollout.source == "streamed",
                problems=self.problems,
            )
            check_adapters(self.models[role], self.problems)

    def _load_data(self) -> None:
        self.sampled = load_sampled(self.config, self.tokenizer, self.plugins.sampler, self.problems)
        self.context = longest_sample(self.config, self.models.get(ACTOR))
        self._add(against_lengths(self.config, self.context))

    def _find_start(self, damaged: Faults) -> None:
        problems, named = self.problems, self.config
        self.config = with_absolute_paths(named)  # only now, because the checks above name files as the user does
        prompts = self.sampled.prompts
        self.start = find_start(self.config, prompts, problems, starting=self.starting, damaged=damaged)
        # Only now, because a resumed run holds out what its checkpoint did; with the paths of the user, for errors.
        self.eval_sets, self.about_sets = load_eval_sets(
            named, self.sampled, self.plugins.sampler, self.context, problems
        )
        algorithm, trains = self.config.algorithm, self.config.run.trains
        # A resume still reads the KL reference from the model's files, if that is a snapshot.
        refers = bool(algorithm.kl_coef) and self.config.roles.reference is None
        refers = refers and not algorithm.reference and not algorithm.reference_every
        for role, model in self.models.items():
            part = self.start.resume / role if self.start.resume else None
            self.notices += check_files(model, part, setting="checkpoint.resume", refers=refers, problems=problems)
        if algorithm.reference and trains and ACTOR in self.models:
            self.notices += check_reference(algorithm.reference, self.models[ACTOR], problems)

    def _resolve_device(self) -> None:
        cluster = self.config.cluster
        with self.problems.stage("cluster.device"):
            self.device = resolve_device(cluster.device, address=cluster.address)
        if self.problems.none_in("cluster"):
            self._add(against_taking_turns(self.config, self.device))

    def _plan_algorithm(self) -> AlgorithmPlan | None:
        config, plugins, problems = self.config, self.plugins, self.problems
        if plugins.sampler is not None and problems.none_in("plugins.samplers"):
            with problems.stage("samplers"):
                self.sampler = plan_sampler(config, plugins.sampler)
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

    def _plan_processes(self, algorithm: AlgorithmPlan | None) -> ProcessPlan | None:
        if not self._known or not self.problems.none_in("cluster.device"):
            return None
        self._choose()
        return plan_processes(
            self.config,
            self.plugins,
            self.problems,
            device=self.device,
            models=self.models,
            run_dir=self.start.run_dir,
            resume=self.start.resume if self.problems.none_in("checkpoint") else None,
            context_length=self.context,
            algorithm=algorithm,
        )

    def _choose(self) -> None:
        if self.problems.none_in("plugins.backends"):
            half = has_bfloat16(self.config.cluster, self.device)
            self.config = with_choices(self.config, self.plugins, self.device, bfloat16=half)

    def finish(self, given: Config) -> Plan:
        """The plan of the `given` config, with what extensions say of it."""
        ready = self.ready
        self._add(self.answers.problems)
        self.problems.raise_all()
        config, sampled = self.config, self.sampled
        # No problems, so nothing is missing.
        assert sampled.tokenizer is not None and sampled.prompts is not None
        check = prompt_check(config, self.context, sampled.tokenizer, sampled.prompts, self.problems)  # takes seconds
        self.problems.raise_all()
        # Without extensions that join every run: where the record is loaded again, those join that are installed there.
        record = to_plain(recorded(evolve(config, extensions=config.chosen_extensions[: self.listed])))
        assert sampled.reward is not None and sampled.params is not None
        return Plan(
            title=_title(config, ready.processes, sampled, self.models, self.plugins),
            run=config.run,
            start=self.start,
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
                context_length=self.context,
                reward=sampled.reward,
                params=sampled.params,
                attempts=config.algorithm.dynamic_sampling or 0,
                spread_on=config.algorithm.dynamic_sampling_on,
                sampler=self.sampler,
                postprocess=sampled.postprocess,
                vocab_size=config.model.vocabulary or self.models[ACTOR].hf.get_text_config().vocab_size,
            ),
            cluster=config.cluster,
            weights=config.weights,
            checkpoint=config.checkpoint,
            eval=config.eval,
            eval_sets=self.eval_sets,
            extensions=config.chosen_extensions,
            resized=partial(_resized, given),
            record=record,
            kept=kept_digests(self.models),
            notices=tuple(dict.fromkeys(self._notices(record))),
        )

    def _notices(self, record: Mapping[str, Any]) -> Iterator[str]:
        config, start, ready, answers = self.config, self.start, self.ready, self.answers
        if start.state and config.run.trains:
            yield from changed_settings(start.state["config"], record)
        yield from (*ignored_tables(config), *absent_extensions(config), *start.data)
        if config.run.samples:
            yield from notices_of_data(config, self.sampled, self.eval_sets, self.about_sets)
        yield from self.notices
        for model in self.models.values():
            yield from notices_of(model)
        yield from notices_of_sampling(config)
        if config.run.trains:
            yield from (*notices_of_learning(config, ready.algorithm), *unpacked(self.models))
        if self.device == "cuda":
            yield from settled(ready.asked, config, self.plugins, decided=answers.by, advice=BY_MEMORY)
        yield from (*answers.reasons, *answers.remarks)

    # ---- the ranks of one role ---------------------------------------------------------------------------------------

    def plan_group(self, role: str, resume: str) -> GroupPlan:
        self._settle()
        self._check(contradictions_of_a_group(self.config))
        problems = self.problems
        if role not in self.config.chosen_roles:
            problems.add(f"roles.{role}: missing; add it, such as roles.{role}.ranks=1, to start this role")
        self._resolve_device()
        problems.raise_all()
        self.config = asked = with_absolute_paths(self.config)
        self._choose()
        config, plugins = self.config, self.plugins
        self._build(load_models(config, [role], plugins, problems))
        problems.raise_all()
        model, part = self.models[role], _part_of(resume, role, frozen=plugins.is_frozen(role))
        self.notices += check_files(model, part, setting="resume", refers=False, problems=problems)
        problems.raise_all()
        plan = plan_role(role, config, plugins, device=self.device, resume=resume, model=model)
        plan = evolve(plan, objective=plan_algorithm(config, plugins).objectives.get(role))
        common = process_environment(config.cluster, device=self.device, transport=plugins.transport)
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
                *self.notices,
                *notices_of(model),
                *unpacked(self.models),
                *(settled(asked, config, plugins) if self.device == "cuda" else ()),
            ),
        )


# Of an algorithm's settings, those that a whole run alone has a use for: with engines, or with the samples of a step.
OF_SAMPLES = ("advantages", "postprocess", "kl_horizon", "old_weights", "dynamic_sampling")


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
