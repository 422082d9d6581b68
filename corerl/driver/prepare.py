"""Resolve and check everything about a run that can be known before its first process."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from corerl.checkpoint.commit import NO_FAULTS, Faults
from corerl.config.check import problems as contradictions
from corerl.config.problems import Problems
from corerl.config.schema import Config, ModelConfig
from corerl.data.prompts import PromptSource, PromptStream
from corerl.driver.algorithm import AlgorithmPlan, check_algorithm, plan_algorithm
from corerl.driver.algorithm import contradictions as against_algorithm
from corerl.driver.inputs import (
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
from corerl.driver.processes import ProcessPlan, plan_processes
from corerl.driver.prompt_check import PromptCheck
from corerl.driver.run_dir import (
    in_the_way,
    lies_in,
    lost_checkpoints,
    require_steps_left,
    require_writable,
    resume_from,
)
from corerl.driver.settle import told, with_precisions, with_recomputation
from corerl.driver.state import read_run
from corerl.errors import CheckpointError, ConfigError
from corerl.models.tokenizer import CHARACTERS
from corerl.plugin.options import distributions_of, resolve_tables, selected, settle_algorithm
from corerl.plugin.registry import load
from corerl.plugin.requirements import require_met
from corerl.plugin.spec import ACTOR
from corerl.rollout.engine import UNLIMITED, SamplingParams
from corerl.rollout.episodes import EpisodeFunction
from corerl.rollout.rewards import Reward
from corerl.rollout.saved import SavedRollouts
from corerl.rollout.sources import Scored
from corerl.trainer.assign import offloaded
from corerl.weights.transports import AUTO, transport_named

AMPERE = (8, 0)  # the first compute capability with bfloat16

if TYPE_CHECKING:
    from corerl.driver.forecast import Forecast
    from corerl.models.layout import Layout


@frozen(kw_only=True)
class Prepared:
    """A fully resolved and checked run, before it touches Ray or a device."""

    config: Config  # plugins' tables resolved, the model's directories absolute
    device: str
    run_dir: Path
    resume: Path | None  # a checkpoint that fits this run, if it resumes
    state: dict[str, Any]  # the driver's part of the checkpoint; empty for a fresh run
    algorithm: AlgorithmPlan
    plan: ProcessPlan
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    check: PromptCheck | None  # to be finished before the first prompt is drawn; None if the run draws none
    context_length: int  # maximum tokens of a sample, prompt and response; 0: unlimited
    notices: tuple[str, ...]  # about what the models' files have, and nothing uses
    lost: tuple[str, ...]  # notices about checkpoints that are newer than `resume`, but damaged
    layouts: Mapping[str, Layout]  # role -> the way through its model
    settled: tuple[str, ...]  # a line for each setting of [train] that was left open, on GPUs
    memory: Forecast | None  # of the devices; None where there is nothing to predict: on CPUs, or without training
    reward: Reward
    params: SamplingParams
    function: EpisodeFunction | None  # plays the samples; None if a sample is one response
    postprocess: Callable[[Scored], Any] | None
    vocab_size: int  # of the actor's model

    @property
    def first_step(self) -> int:
        """Rollout steps already done; 0 for a run that only samples, which takes just the weights of a checkpoint."""
        return 0 if self.config.run.mode == "rollout-only" else int(self.state.get("rollout_step", 0))

    @property
    def longest_prompt(self) -> int:
        """Maximum tokens of a prompt, which leave room for rollout.max_tokens after it."""
        return self.context_length - self.config.rollout.max_tokens if self.context_length else UNLIMITED

    @property
    def same_run(self) -> bool:
        """Whether it resumes from its own directory, which then also holds the earlier metrics."""
        return self.resume is None or lies_in(self.resume, self.run_dir)


def prepare(config: Config, *, starting: bool = True, damaged: Faults = NO_FAULTS) -> Prepared:
    """Resolve and check everything that can be checked without a process.

    Raises UserError with a line per problem; checks that depend on a wrong setting are skipped. Unless a run is
    `starting`, its directory may already hold one: the config that a run has written stays valid. A run goes on by
    itself from none of the checkpoints that ranks have found to be `damaged`.
    """
    problems = Problems()
    with problems.stage("algorithm's spec", path="algorithm.name"):
        config = settle_algorithm(config)
    known = problems.none_in("algorithm's spec")
    for line in contradictions(config):
        if known or not line.startswith("algorithm."):  # what is unset is not known without
            problems.add(line)
    if known and config.run.mode != "eval":
        for line in against_algorithm(config):
            problems.add(line)
    models, tokenizer = load_models(config, problems)
    built = built_models(config, models, problems)
    layouts = choose_layouts(config, built, problems)
    prompts, reward, params = load_sampled(config, tokenizer, problems)
    function, postprocess = load_functions(config.rollout, problems)
    if config.rollout.saved and config.run.mode == "train-only":
        with problems.stage("rollout.saved"):
            SavedRollouts(config.rollout.saved, steps=config.run.steps, vocab_size=0)  # raises if there are too few
    context = longest_sample(config, models)
    require_positions(config, built, problems)
    require_room_for_prompts(config, context, problems)
    config = _with_absolute_paths(config)  # only now, because the checks above name files as the user does
    with problems.stage("weights.transport", path="weights.transport"):
        if config.weights.transport != AUTO:
            transport_named(config.weights.transport)  # raises if unknown
    run_dir = Path(config.run.dir).absolute()
    resume, state = _beginning(config, run_dir, prompts, problems, starting=starting, damaged=damaged)
    notices = check_weights(config, resume if problems.none_in("checkpoint.resume") else None, models, built, problems)
    device = ""
    with problems.stage("cluster.device"):
        device = resolve_device(config.cluster.device, address=config.cluster.address)
    if problems.none_in("cluster"):
        for line in _taking_turns(config, device):
            problems.add(line)
    _require_versions(config, problems)
    config = _resolve_plugins(config, problems)
    algorithm: AlgorithmPlan | None = None
    if problems.none_in("plugins"):
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
        run_dir=run_dir,
        resume=resume if problems.none_in("checkpoint") else None,
    )
    plan: ProcessPlan | None = None
    if problems.none_in("plugins", "cluster.device"):
        config = with_precisions(config, device, bfloat16=has_bfloat16(config, device))
        plan = planned(config, problems)
    problems.raise_all()

    # No problems, so nothing is missing.
    assert plan is not None and tokenizer is not None and algorithm is not None
    assert prompts is not None and reward is not None and params is not None
    config, plan, memory = _fitted(config, asked, algorithm, plan, planned, problems, models, built)
    problems.raise_all()
    check = prompt_check(config, context, tokenizer, prompts, problems)  # last: it may take seconds
    problems.raise_all()
    return Prepared(
        config=config,
        device=device,
        run_dir=run_dir,
        resume=resume,
        state=state,
        algorithm=algorithm,
        plan=plan,
        tokenizer=tokenizer,
        prompts=prompts,
        check=check,
        context_length=context,
        notices=notices,
        lost=tuple(lost_checkpoints(config, run_dir, damaged)),
        layouts=layouts,
        memory=memory,
        settled=tuple(told(asked, config)) if device == "cuda" else (),
        reward=reward,
        params=params,
        function=function,
        postprocess=postprocess,
        vocab_size=models[ACTOR].get_text_config().vocab_size,
    )


def _fitted(
    config: Config,
    asked: Config,
    algorithm: AlgorithmPlan,
    plan: ProcessPlan,
    planned: Callable[[Config, Problems], ProcessPlan | None],
    problems: Problems,
    models: Mapping[str, PreTrainedConfig],
    built: Mapping[str, PreTrainedModel],
) -> tuple[Config, ProcessPlan, Forecast | None]:
    """The config with recomputation where it was left open and memory wants it, its plan, and the memory predicted of
    GPUs. On this machine's, a role that cannot be trained is a problem."""
    if next(iter(plan.roles.values())).assignments[0].config.device != "cuda" or not config.run.trains:
        return with_recomputation(config, {}), plan, None
    from corerl.driver.forecast import Forecaster  # slow to import: takes seconds

    # Not by the model's positions, which are often many times as many as samples ever have tokens.
    longest = config.rollout.context_length
    forecaster = Forecaster(
        config=config, asked=asked, algorithm=algorithm, plan=plan, models=models, built=built, longest=longest
    )
    memory, there = forecaster.forecast(), device_memory(config)
    full = with_recomputation(config, {role: memory.tight(role, there=there) for role in plan.roles})
    config = with_recomputation(config, {})
    if full != config and (again := planned(full, Problems())) is not None:  # None: a backend cannot, as configured
        config, plan = full, again
        forecaster = evolve(forecaster, config=config, plan=plan)
        memory = forecaster.forecast()
    for line in forecaster.too_large(memory, there=there) if there else ():
        problems.add(line)
    return config, plan, memory


def has_bfloat16(config: Config, device: str) -> bool:
    """Whether the GPUs of this machine compute in bfloat16; those of a cluster, which are not known yet, may."""
    if device != "cuda" or config.cluster.address:
        return True
    return all(torch.cuda.get_device_capability(index) >= AMPERE for index in range(torch.cuda.device_count()))


def device_memory(config: Config) -> int:
    """Bytes of this machine's smallest GPU; 0 for a cluster, whose devices are not known yet."""
    if config.cluster.address:
        return 0
    return min(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))


def told_memory(prepared: Prepared, *, fullest: bool = False) -> list[str]:
    """What is predicted of the devices' memory: a line for each stage of a step, or for the `fullest` one."""
    if (memory := prepared.memory) is None:
        return []
    return [*memory.lines[: 1 if fullest else None], *memory.unknown]


def _beginning(
    config: Config,
    run_dir: Path,
    prompts: PromptSource | None,
    problems: Problems,
    *,
    starting: bool,
    damaged: Faults,
) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint to resume from and the driver's part of it; None and {} for a fresh run."""
    resume: Path | None = None
    state: dict[str, Any] = {}
    with problems.stage("run.dir"):
        require_writable(run_dir)
    if problems.none_in("checkpoint.resume", "run.dir"):
        with problems.stage("checkpoint.resume"):
            resume = resume_from(config, run_dir, starting=starting, damaged=damaged)
            state = read_run(resume) if resume else {}
    if state and config.run.mode != "eval":
        with problems.stage("checkpoint.source"):
            require_same_source(state, config, str(resume))
    if state and config.run.mode == "train" and prompts is not None and problems.none_in("data", "checkpoint"):
        with problems.stage("checkpoint.data"):
            PromptStream(prompts, config.run.seed).restore(state["source"]["prompts"])  # raises if it does not fit
    if starting:
        for line in in_the_way(config, run_dir, resume):
            problems.add(line)
        if resume and state and config.run.trains:
            with problems.stage("run.steps"):
                require_steps_left(config, run_dir, resume, done=int(state["rollout_step"]))
    return resume, state


def told_answers(prepared: Prepared) -> list[str]:
    """One line if prompts have no answers: rewards that compare with the answer would fail or be 0."""
    config, prompts = prepared.config, prepared.prompts
    if not config.run.samples or not prompts.unanswered:
        return []
    if prompts.unanswered < len(prompts):
        where = prompts.where(prompts.first_unanswered)
        return [f"data: {prompts.unanswered} of {len(prompts)} prompts have no answer; the first: {where}"]
    has = ", ".join(prompts.prompt(0).fields) or "nothing"
    line = f"data.answer_key: none of the {len(prompts)} prompts has an answer under {config.data.answer_key!r}"
    return [f"{line}; the first one has: {has}"]


def told_layouts(prepared: Prepared) -> list[str]:
    """One line for each reason why a role's model is not packed, though packing would be faster."""
    return list(
        dict.fromkeys(
            f"{prepared.config.train_table_of(role)}.layout: whole, on padded rows, because {layout.why}"
            for role, layout in prepared.layouts.items()
            if layout.why
        )
    )


def _taking_turns(config: Config, device: str) -> Iterator[str]:
    """Problems, one line each, of settings that conflict with ranks and engines taking turns in device memory."""
    if not offloaded(config, device):
        return
    if config.weights.every > 1:
        yield (
            f"weights.every: {config.weights.every}, but engines that share memory with the ranks in turns get new "
            "weights every step; set it to 1, or cluster.offload='never', or cluster.placement='disaggregated'"
        )
    if config.rollout.source != "synchronous" and config.run.mode == "train":
        yield (
            f"rollout.source: {config.rollout.source!r} samples while ranks train, but here engines and ranks take "
            "turns in memory; set cluster.placement='disaggregated', or rollout.source='synchronous', or, if both fit "
            "in memory, cluster.offload='never'"
        )


def _resolve_plugins(config: Config, problems: Problems) -> Config:
    """Convert each plugin's table to its config class, if all plugins are found and their tables are valid."""
    for each in selected(config):
        with problems.stage("plugins", path=each.path):
            load(each.kind, each.name)
    if problems.none_in("plugins"):
        with problems.stage("plugins"):
            return resolve_tables(config)
    return config


def _require_versions(config: Config, problems: Problems) -> None:
    """Check what CoreRL and the config's plugins require of other packages, also of a plugin that cannot be loaded."""
    with problems.stage("versions"):
        require_met(distributions_of(config))


def _with_absolute_paths(config: Config) -> Config:
    """Make paths absolute, for processes with another working directory and for later readers of the run's config."""

    def there(source: str) -> str:
        return str(Path(source).absolute()) if source and os.path.exists(source) else source

    data = config.data
    data = evolve(
        data, source=there(data.source), sources=tuple(evolve(each, source=there(each.source)) for each in data.sources)
    )
    config = evolve(config, model=_absolute(config.model), data=data)
    config = evolve(config, rollout=evolve(config.rollout, saved=there(config.rollout.saved)))
    config = evolve(config, algorithm=evolve(config.algorithm, reference=there(config.algorithm.reference)))
    critic = config.roles.critic
    if critic is None or critic.model is None:
        return config
    return evolve(config, roles=evolve(config.roles, critic=evolve(critic, model=_absolute(critic.model))))


def _absolute(model: ModelConfig) -> ModelConfig:
    def absolute(directory: str) -> str:
        return str(Path(directory).absolute()) if directory and not directory.startswith(CHARACTERS) else directory

    return evolve(model, path=absolute(model.path), tokenizer=absolute(model.tokenizer))


def resolve_device(device: str, *, address: str = "") -> str:
    """`auto` means cuda if torch sees a GPU on the driver's machine, whatever a cluster at `address` has.

    Raises ConfigError for `cuda` without a GPU; with a cluster at `address` it is not checked.
    """
    if device == "cuda" and address:
        return device
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ConfigError("cluster.device: 'cuda', but torch sees no CUDA device here; use 'cpu' or 'auto'")
    return "cuda" if there and device != "cpu" else "cpu"


def require_same_source(state: Mapping[str, Any], config: Config, checkpoint: str) -> None:
    """Raise CheckpointError if a run that samples would resume one that read saved batches, or the other way round."""
    sampled = "prompts" in state["source"]
    if sampled != config.run.samples:
        raise CheckpointError(
            f"{checkpoint} is of a run that {'sampled its batches' if sampled else 'read saved batches'}, but "
            f"run.mode={config.run.mode!r} does not; resume with the run.mode it was trained with"
        )


def title(prepared: Prepared) -> str:
    config = prepared.config
    model = Path(config.model.path).name if config.model.path else f"{config.model.config['model_type']} from scratch"
    ranks = [
        f"{len(plan.assignments)} {plan.backend.name} rank{'s' * (len(plan.assignments) != 1)}"
        + (f" for the {role}" if role != ACTOR else "")
        + (" (whole)" if config.run.trains and prepared.layouts[role].name == "whole" else "")
        for role, plan in prepared.plan.roles.items()
    ]
    if config.run.samples:
        engines = config.rollout.replicas
        ranks.append(f"{engines} {prepared.plan.engine.name} engine{'s' * (engines != 1)}")
    if config.run.samples:
        source = " + ".join(share.name for share in prepared.prompts.shares) or config.data.source
    else:
        source = config.rollout.saved
    return f"{config.algorithm.name} on {source}: {model}, {', '.join(ranks)}, {prepared.device}"
