"""Resolve and check everything about a run that can be known before its first process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from corerl.config.check import problems as contradictions
from corerl.config.functions import imported
from corerl.config.problems import Problems
from corerl.config.schema import Config, ModelConfig, RolloutConfig
from corerl.data.load import load_prompts
from corerl.data.prompts import PromptSource, PromptStream
from corerl.driver.chats import ChatCheck
from corerl.driver.processes import ProcessPlan, plan_processes
from corerl.driver.run_dir import in_the_way, lies_in, require_steps_left, resume_from
from corerl.driver.state import read_run
from corerl.errors import CheckpointError, ConfigError, DataError
from corerl.models.config import context_length, experts, hf_config
from corerl.models.tokenizer import CHARACTERS, end_tokens, load_tokenizer, require_room_for_tokens
from corerl.plugin.options import distributions_of, resolve_tables, selected
from corerl.plugin.registry import load
from corerl.plugin.requirements import require_met
from corerl.rollout.encoding import longer_than, require_encodable
from corerl.rollout.engine import UNLIMITED, SamplingParams
from corerl.rollout.episodes import EpisodeFunction, resolve_function
from corerl.rollout.rewards import Reward, require_any_thread, reward_of
from corerl.rollout.sampler import sampling_params
from corerl.rollout.saved import SavedRollouts
from corerl.rollout.sources import Scored
from corerl.trainer.assign import ACTOR, loss_of, offloaded
from corerl.weights.transports import AUTO, transport_named


@frozen(kw_only=True)
class Prepared:
    """A fully resolved and checked run, before it touches Ray or a device."""

    config: Config  # plugins' tables resolved, the model's directories absolute
    device: str
    run_dir: Path
    resume: Path | None  # a checkpoint that fits this run, if it resumes
    state: dict[str, Any]  # the driver's part of the checkpoint; empty for a fresh run
    plan: ProcessPlan
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    chats: ChatCheck  # to be finished before the first prompt is drawn
    context_length: int  # maximum tokens of a sample, prompt and response; 0: unlimited
    too_long: str  # notice about prompts that are left out because they do not fit; empty if all fit
    unused: tuple[str, ...]  # notices about tensors in the models' files that the models lack
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


def prepare(config: Config, *, starting: bool = True) -> Prepared:
    """Resolve and check everything that can be checked without a process.

    Raises UserError with a line per problem; checks that depend on a wrong setting are skipped. Unless a run is
    `starting`, its directory may already hold one: the config that a run has written stays valid.
    """
    problems = Problems()
    for line in contradictions(config):
        problems.add(line)
    models, tokenizer = _models(config, problems)
    built = _built(config, models, problems)
    prompts, chats, reward, params = _sampled(config, tokenizer, problems, starting=starting)
    function, postprocess = _functions(config.rollout, problems)
    if config.rollout.saved and config.run.mode == "train-only":
        with problems.stage("rollout.saved"):
            SavedRollouts(config.rollout.saved, steps=config.run.steps, vocab_size=0)  # raises if there are too few
    context = _context_length(config, models)
    _require_positions(config, built, problems)
    too_long = ""
    if context and config.run.samples:
        too_long = _leave_out_long(config, context, tokenizer, prompts, problems)
    config = _with_absolute_paths(config)  # only now, because the checks above name files as the user does
    with problems.stage("weights.transport", path="weights.transport"):
        if config.weights.transport != AUTO:
            transport_named(config.weights.transport)  # raises if unknown
    run_dir = Path(config.run.dir).absolute()
    resume, state = _beginning(config, run_dir, prompts, problems, starting=starting)
    unused = _check_weights(config, resume if problems.none_in("checkpoint.resume") else None, models, built, problems)
    device = ""
    with problems.stage("cluster.device"):
        device = resolve_device(config.cluster.device, address=config.cluster.address)
    for role in config.chosen_roles:
        with problems.stage("algorithm.loss", path="algorithm.loss"):
            loss_of(role, config)  # raises if impossible
    if problems.none_in("cluster"):
        for line in _taking_turns(config, device):
            problems.add(line)
    _require_versions(config, problems)
    config = _resolve_plugins(config, problems)
    plan: ProcessPlan | None = None
    if problems.none_in("plugins", "cluster.device"):
        fits = resume if problems.none_in("checkpoint") else None
        plan = plan_processes(config, problems, device=device, models=models, run_dir=run_dir, resume=fits)
    problems.raise_all()
    if chats is not None and config.run.samples:
        chats.begin()

    # No problems, so nothing is missing.
    assert plan is not None and tokenizer is not None
    assert prompts is not None and chats is not None and reward is not None and params is not None
    return Prepared(
        config=config,
        device=device,
        run_dir=run_dir,
        resume=resume,
        state=state,
        plan=plan,
        tokenizer=tokenizer,
        prompts=prompts,
        chats=chats,
        context_length=context,
        too_long=too_long,
        unused=unused,
        reward=reward,
        params=params,
        function=function,
        postprocess=postprocess,
        vocab_size=models[ACTOR].get_text_config().vocab_size,
    )


def _models(config: Config, problems: Problems) -> tuple[dict[str, PreTrainedConfig], PreTrainedTokenizerBase | None]:
    """The valid roles' model configs, and the tokenizer."""
    models: dict[str, PreTrainedConfig] = {}
    for role in config.chosen_roles:
        own, table = config.model_of(role), config.model_table_of(role)
        if own is config.model and ACTOR in models:
            models[role] = models[ACTOR]
        elif problems.none_in(table):
            with problems.stage(f"{table}.config", path=f"{table}.path" if own.path else f"{table}.config"):
                models[role] = hf_config(own)
    tokenizer: PreTrainedTokenizerBase | None = None
    if problems.none_in("model.path", "model.tokenizer"):
        with problems.stage("model.tokenizer"):
            tokenizer = load_tokenizer(tokenizer=config.model.tokenizer, path=config.model.path)
    for role, hf in models.items():
        own, table = config.model_of(role), config.model_table_of(role)
        if tokenizer is not None:
            with problems.stage(f"{table}.vocabulary"):
                require_room_for_tokens(hf, tokenizer, own, table=table)
    replay = config.algorithm.routing_replay
    if replay != "none" and ACTOR in models and experts(models[ACTOR]) == 1:
        problems.add(f"algorithm.routing_replay: {replay!r}, but the model has no experts; set it to 'none'")
    return models, tokenizer


def _sampled(
    config: Config, tokenizer: PreTrainedTokenizerBase | None, problems: Problems, *, starting: bool
) -> tuple[PromptSource | None, ChatCheck | None, Reward | None, SamplingParams | None]:
    """The prompts, and how they are checked, sampled and scored; None for what is wrong."""
    params: SamplingParams | None = None
    if tokenizer is not None:
        with problems.stage("rollout.stop"):
            replays = config.algorithm.routing_replay == "engine"
            ends = end_tokens(tokenizer, config.model)
            params = evolve(sampling_params(config.rollout, tokenizer, ends), routed_experts=replays)
    prompts: PromptSource | None = None
    chats: ChatCheck | None = None
    with problems.stage("data", path="data.source"):
        prompts = load_prompts(config.data, seed=config.run.seed)
        if tokenizer is not None:
            options = config.data.chat_template_options
            require_encodable(prompts, tokenizer, options)
            chats = ChatCheck(prompts, tokenizer, options, skip=config.data.refused == "skip")
            if config.run.samples and (chats.few or not starting):
                chats.finish()
    reward: Reward | None = None
    with problems.stage("reward", path="reward.name"):
        reward = reward_of(config.reward)
        aside = config.rollout.source != "synchronous" and config.run.mode == "train"
        if prompts is not None and aside and not config.reward.processes:
            first = prompts.prompt(int(prompts.train[0]))
            require_any_thread(reward, first, setting=f"rollout.source={config.rollout.source!r}")
    return prompts, chats, reward, params


def _functions(
    rollout: RolloutConfig, problems: Problems
) -> tuple[EpisodeFunction | None, Callable[[Scored], Any] | None]:
    """The user's functions that play the samples and process them; None for one that is not set, or wrong."""
    function: EpisodeFunction | None = None
    if rollout.function:
        with problems.stage("rollout.function"):
            function = resolve_function(rollout.function, rollout.episodes.options)
    postprocess: Callable[[Scored], Any] | None = None
    if rollout.postprocess:
        with problems.stage("rollout.postprocess"):
            postprocess = imported(rollout.postprocess, setting="rollout.postprocess")
    return function, postprocess


def _context_length(config: Config, models: Mapping[str, PreTrainedConfig]) -> int:
    """Maximum tokens of a sample; 0 if neither the config nor the model sets a limit."""
    own = context_length(models[ACTOR]) if ACTOR in models else None
    return config.rollout.context_length or own or 0


def _leave_out_long(
    config: Config,
    context: int,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: PromptSource | None,
    problems: Problems,
) -> str:
    """Leave out the prompts that leave no room for a response. Returns a notice about them; empty if all fit."""
    rollout = config.rollout
    of = "rollout.context_length" if rollout.context_length else "the model has max_position_embeddings"
    bound = f"{of}={context}"
    longest = context - rollout.max_tokens
    if longest < 1:
        problems.add(f"rollout.max_tokens: {rollout.max_tokens} leaves no room for a prompt, {bound}; lower it")
    if longest < 1 or prompts is None or tokenizer is None or not problems.none_in("data"):
        return ""
    too_long = ""
    with problems.stage("data", path="data.source"):
        if lengths := longer_than(longest, prompts, tokenizer, config.data.chat_template_options):
            why = (
                f"they have up to {max(lengths.values())} tokens, but at most {longest} fit with "
                f"rollout.max_tokens={rollout.max_tokens} ({bound})"
            )
            too_long = f"data: {len(lengths)} of {len(prompts)} prompts are skipped: {why}"
            try:
                prompts.leave_out(frozenset(lengths))
            except DataError as error:
                raise DataError(f"{error.message}: {why}; lower rollout.max_tokens or shorten the prompts") from error
    return too_long


def _beginning(
    config: Config,
    run_dir: Path,
    prompts: PromptSource | None,
    problems: Problems,
    *,
    starting: bool,
) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint to resume from and the driver's part of it; None and {} for a fresh run."""
    resume: Path | None = None
    state: dict[str, Any] = {}
    if problems.none_in("checkpoint.resume"):
        with problems.stage("checkpoint.resume"):
            resume = resume_from(config, run_dir, starting=starting)
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


def _built(config: Config, models: Mapping[str, PreTrainedConfig], problems: Problems) -> dict[str, PreTrainedModel]:
    """The roles' models on meta, of those that can be built, and that this machine can hold."""
    from corerl.driver import weights  # slow to import: takes seconds

    found: dict[str, PreTrainedModel] = {}
    for role, hf in models.items():
        own, table = config.model_of(role), config.model_table_of(role)
        with problems.stage(f"{table}.config", path=f"{table}.path" if own.path else f"{table}.config"):
            model = weights.built(role, hf)
            if not config.cluster.address:  # whose machines are not known yet
                weights.require_memory(model, there=weights.memory_here())
            found[role] = model
    return found


def _require_positions(config: Config, built: Mapping[str, PreTrainedModel], problems: Problems) -> None:
    """Check that each model has a position for every token of a sample."""
    from corerl.models.positions import position_rows  # slow to import: takes seconds

    wanted = config.rollout.context_length
    for role, model in built.items():
        rows = position_rows(model)
        if rows is not None and wanted > rows:
            whose = "" if role == ACTOR else f"{role}'s "
            problems.add(f"rollout.context_length: {wanted}, but the {whose}model has {rows} positions; lower it")


def _check_weights(
    config: Config,
    resume: Path | None,
    models: Mapping[str, PreTrainedConfig],
    built: Mapping[str, PreTrainedModel],
    problems: Problems,
) -> tuple[str, ...]:
    """Check that the files that the roles start from hold their models. Returns notices about what else they hold."""
    from corerl.driver.weights import require_same_model, require_weights  # slow to import: takes seconds

    notices: list[str] = []
    for role, model in built.items():
        own, table = config.model_of(role), config.model_table_of(role)
        if resume:
            with problems.stage("checkpoint.model"):
                require_same_model(resume, role, model)
        read = own.path and (not resume or config.algorithm.kl_coef)  # a resume still reads the KL reference from it
        if read and problems.none_in("model", table, "checkpoint"):
            with problems.stage(f"{table}.weights", path=f"{table}.path"):
                if unused := require_weights(own.path, model, models[role]):
                    notices.append(f"{table}.path: {unused}")
    return tuple(dict.fromkeys(notices))


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
