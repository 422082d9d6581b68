"""Everything about a run that can be known, and be wrong, before its first process."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import evolve, frozen
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from corerl.checkpoint.commit import latest, read_state
from corerl.cluster.placement import Seating, arrange
from corerl.config.check import problems as contradictions
from corerl.config.check import uneven
from corerl.config.functions import imported
from corerl.config.schema import ClusterInfo, Config, ModelConfig
from corerl.data.load import load_prompts
from corerl.data.prompts import PromptSource, PromptStream
from corerl.driver.transports import choose_transport, senders
from corerl.errors import CheckpointError, ConfigError, ModelError, UserError
from corerl.models.config import experts, hf_config
from corerl.models.tokenizer import CHARACTERS, load_tokenizer
from corerl.plugin.capabilities import FULL, Capability, Grade
from corerl.plugin.options import backend_name, check_spec, resolve_tables, role_options, selected
from corerl.plugin.registry import Kind, Loaded, load
from corerl.rollout.encoding import require_encodable
from corerl.rollout.engine import SamplingParams
from corerl.rollout.episodes import EpisodeFunction, resolve_function
from corerl.rollout.rewards import Reward, resolve_reward
from corerl.rollout.sampler import sampling_params
from corerl.rollout.saved import ROLLOUTS, SavedRollouts
from corerl.rollout.sources import Scored
from corerl.trainer.assign import ACTOR, RolePlan, cluster_of, loss_of, offloaded, plan_role
from corerl.types import LossSpec
from corerl.weights.transports import require_transport

TABLE = re.compile(rf"(?:{'|'.join(attrs.fields_dict(Config))})[.\[=:]")  # how a line begins that has its path

EXPORT = "model"  # where in run.dir a Hugging Face directory is written at the end
ENGINES = "engines"  # the group of engine processes, beside those of the roles


@frozen(kw_only=True)
class Prepared:
    """All that a run is before its first process: nothing here has touched Ray or a device."""

    config: Config  # plugins' tables resolved, the model's directories absolute
    device: str
    run_dir: Path
    resume: Path | None  # a checkpoint that fits this run
    state: dict[str, Any]  # the driver's part of it; empty where the run begins
    roles: Mapping[str, RolePlan]  # the actor first
    engine: Loaded
    engines: ClusterInfo  # what its spec may know
    seating: Seating
    transport: str  # of weights
    senders: tuple[int, ...]  # of each engine, the actor's rank on its device; empty where one has none
    tokenizer: Any
    prompts: PromptSource
    reward: Reward
    params: SamplingParams
    function: EpisodeFunction | None  # that plays the samples; None where a sample is one response
    postprocess: Callable[[Scored], Any] | None
    vocab_size: int  # of the actor's model

    @property
    def first_step(self) -> int:
        """Rollout steps that are behind it. One that only samples has none: what it resumes is another run's, of which
        it takes the weights."""
        return 0 if self.config.run.mode == "rollout-only" else int(self.state.get("rollout_step", 0))


class Problems:
    """Collects the user's errors, each under a setting, so that they are told together."""

    def __init__(self) -> None:
        self._found: list[tuple[str, UserError]] = []

    def add(self, setting: str, error: UserError) -> None:
        self._found.append((setting, error))

    @contextmanager
    def stage(self, setting: str, *, path: str = "") -> Iterator[None]:
        """An error of the user's ends the block, and no more than the block. `path` is where it stands in the config,
        for what raises without knowing."""
        try:
            yield
        except UserError as error:
            self.add(setting, _at(path, error) if path else error)

    def none_in(self, *settings: str) -> bool:
        """Whether nothing is wrong with these settings, or with what is inside them: ask before building on them."""
        return not any(f"{found}.".startswith(f"{setting}.") for setting in settings for found, _ in self._found)

    def raise_all(self) -> None:
        """One error as it is; several as one ConfigError with the lines of each."""
        errors = list({error.message: error for _, error in self._found}.values())
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ConfigError("\n".join(error.message for error in errors)) from ExceptionGroup("problems", errors)


def _at(path: str, error: UserError) -> UserError:
    """The same error, `path` before each line that has none."""
    lines = [line if TABLE.match(line) else f"{path}: {line}" for line in error.message.splitlines()]
    told = type(error)("\n".join(lines))
    told.__cause__ = error
    return told


def prepare(config: Config, *, starting: bool = True) -> Prepared:
    """Resolve and check everything that can be checked without a process.

    Raises UserError with a line for each problem; what builds on a setting that is wrong is left out. Unless a run is
    `starting`, its directory may hold one already: the config that a run has written stays a valid one.
    """
    problems = Problems()
    for line in contradictions(config):
        problems.add(line.partition(":")[0], ConfigError(line))

    if problems.none_in("model.path", "model.config"):
        with problems.stage("model.config"):
            model = hf_config(config.model)
    if problems.none_in("model.path", "model.tokenizer"):
        with problems.stage("model.tokenizer"):
            tokenizer = load_tokenizer(tokenizer=config.model.tokenizer, path=config.model.path)
    if problems.none_in("model"):
        with problems.stage("model.vocabulary"):
            require_room_for_tokens(model, tokenizer, config.model)
    models = {ACTOR: model} if problems.none_in("model.path", "model.config") else {}
    for role in config.chosen_roles:
        own = config.model_of(role)
        if own is config.model and models:
            models[role] = model
        elif own is not config.model and problems.none_in(f"roles.{role}.model", "model"):
            with problems.stage(f"roles.{role}.model"):
                models[role] = hf_config(own)
                require_room_for_tokens(models[role], tokenizer, own, table=f"roles.{role}.model")
    replay = config.algorithm.routing_replay
    if replay != "none" and ACTOR in models and experts(models[ACTOR]) == 1:
        line = f"algorithm.routing_replay: {replay!r}, and the model has no experts to choose from; set it to 'none'"
        problems.add("algorithm.routing_replay", ConfigError(line))
    if problems.none_in("model.path", "model.tokenizer"):
        with problems.stage("rollout.stop"):
            params = evolve(sampling_params(config.rollout, tokenizer), routed_experts=replay == "engine")
    with problems.stage("data", path="data.source"):
        prompts = load_prompts(config.data, seed=config.run.seed)
        if problems.none_in("model.path", "model.tokenizer"):
            require_encodable(prompts, tokenizer)
    with problems.stage("reward", path="reward.name"):
        reward = resolve_reward(config.reward.name, config.reward.options)
    function: EpisodeFunction | None = None
    if config.rollout.function:
        with problems.stage("rollout.function"):
            function = resolve_function(config.rollout.function, config.rollout.episodes.options)
    postprocess: Callable[[Scored], Any] | None = None
    if config.rollout.postprocess:
        with problems.stage("rollout.postprocess"):
            postprocess = imported(config.rollout.postprocess, setting="rollout.postprocess")
    if config.rollout.saved and config.run.mode == "train-only":
        with problems.stage("rollout.saved"):
            SavedRollouts(config.rollout.saved, steps=config.run.steps, vocab_size=0)  # raises where there are too few
    config = _with_absolute_paths(config)  # after what names files as the user does
    with problems.stage("weights.transport", path="weights.transport"):
        require_transport(config.weights.transport)

    run_dir = Path(config.run.dir).absolute()
    resume: Path | None = None
    state: dict[str, Any] = {}
    if problems.none_in("checkpoint.resume"):
        with problems.stage("checkpoint.resume"):
            resume = resume_from(config, run_dir, starting=starting)
            state = read_state(resume) if resume else {}
    if resume and problems.none_in("checkpoint.resume"):
        from corerl.driver.weights import require_same_model  # imports what takes seconds

        with problems.stage("checkpoint.model"):
            for role, hf in models.items():
                require_same_model(resume, role, hf)
    for role, hf in models.items():
        own = config.model_of(role)
        read = own.path and (not resume or config.algorithm.kl_coef)  # what is measured against is read again
        if read and problems.none_in("model", f"roles.{role}.model", "checkpoint"):
            table = config.model_table_of(role)
            from corerl.driver.weights import require_weights  # imports what takes seconds

            with problems.stage(f"{table}.weights", path=f"{table}.path"):
                require_weights(own.path, role, hf)
    if state and config.run.mode != "eval":
        with problems.stage("checkpoint.source"):
            require_same_source(state, config, str(resume))
    if state and config.run.mode == "train" and problems.none_in("data", "checkpoint"):
        with problems.stage("checkpoint.data"):
            PromptStream(prompts, config.run.seed).restore(state["source"]["prompts"])  # raises where it does not fit

    with problems.stage("cluster.device"):
        device = resolve_device(config.cluster.device, address=config.cluster.address)
    losses: dict[str, LossSpec] = {}
    for role in config.chosen_roles:
        with problems.stage("algorithm.loss", path="algorithm.loss"):
            losses[role] = loss_of(role, config)
    if config.weights.every > 1 and problems.none_in("cluster") and offloaded(config, device):
        line = (
            f"weights.every: {config.weights.every}, and engines that take turns in memory with the ranks get fresh "
            "weights at every step; set it to 1, or cluster.offload='never', or cluster.placement='disaggregated'"
        )
        problems.add("weights.every", ConfigError(line))
    overlaps = config.rollout.source != "synchronous" and config.run.mode == "train"
    if overlaps and problems.none_in("cluster") and offloaded(config, device):
        line = (
            f"rollout.source: {config.rollout.source!r} has engines sample while ranks train, and here they take turns "
            "in memory; set cluster.placement='disaggregated', or rollout.source='synchronous', or, where both fit, "
            "cluster.offload='never'"
        )
        problems.add("rollout.source", ConfigError(line))
    keeps = config.run.mode == "rollout-only" or (config.rollout.save and config.run.samples)
    goes_on = config.run.trains and resume is not None and resume.resolve().is_relative_to(run_dir.resolve())
    if starting and keeps and not goes_on and os.path.isdir(run_dir / ROLLOUTS):
        line = f"run.dir: {run_dir} holds rollouts already, which would be mixed with new ones; give another run.dir"
        problems.add("run.dir", ConfigError(line))
    exports = config.run.trains and config.checkpoint.export
    if starting and exports and os.path.lexists(run_dir / EXPORT) and latest(run_dir) is None:
        line = (
            f"run.dir: {run_dir / EXPORT} is there already, and the run would put its export in its place; give "
            "another run.dir, or set checkpoint.export=false"
        )
        problems.add("run.dir", ConfigError(line))
    config = _resolve_plugins(config, problems)
    groups = {role: choice.ranks for role, choice in config.chosen_roles.items()}
    if config.run.samples:
        groups[ENGINES] = config.rollout.replicas
    apart = [*config.apart, *([ENGINES] if config.cluster.placement == "disaggregated" else [])]
    transport = config.weights.transport
    sending: tuple[int, ...] = ()
    widths: dict[str, int] = {}
    plans: dict[str, RolePlan] = {}
    if problems.none_in("plugins", "cluster.device"):
        engine = load(Kind.ENGINES, config.rollout.engine)
        fields = {role: hf.to_dict() for role, hf in models.items()}
        clusters = {
            role: cluster_of(role, config, device=device, model=fields.get(role)) for role in config.chosen_roles
        }
        engines = evolve(clusters[ACTOR], ranks=config.rollout.replicas, weights=config.weights)
        with problems.stage("weights.transport"):
            widths = {ENGINES: engine.spec.bundles(config.engines[engine.name], engines)} if config.run.samples else {}
            seats = arrange(groups, apart=apart, widths=widths, cpus=1.0, gpus=0.0)
            transport, sending = transport_of(config, seats, device)
        chosen = evolve(config, weights=evolve(config.weights, transport=transport))
        with problems.stage("engines"):
            check_spec(engine, config.engines[engine.name], engines, config=config)
            require_form(config, engine, engines)
        names: dict[str, str] = {}  # of extensions, each with what the config calls it
        for index, each in enumerate(config.extensions):
            with problems.stage("extensions"):
                extension = load(Kind.EXTENSIONS, each.name)
                if names.setdefault(extension.name, each.name) != each.name:
                    raise ConfigError(f"extensions: {each.name!r} and {names[extension.name]!r} share a name; keep one")
                table = f"extensions[{index}].options"
                check_spec(extension, each.options, clusters[ACTOR], config=config, table=table)
        for role in config.chosen_roles:
            with problems.stage("backends"):  # `plan_role` asks this too, but not where a capability is missing
                backend = load(Kind.BACKENDS, backend_name(config, role))
                options = role_options(config, role, backend)
                check_spec(backend, options, clusters[role], config=config, role=role)
                if line := uneven(role, config, data_parallel=backend.spec.data_parallel(options, clusters[role])):
                    problems.add("rollout.prompts", ConfigError(line))
            with problems.stage(f"roles.{role}", path=f"roles.{role}"):
                plans[role] = plan_role(
                    role,
                    chosen,
                    loss=losses.get(role),
                    experts=experts(models[role]) if role in models else 1,
                    device=device,
                    run_dir=str(run_dir),
                    resume=str(resume / role) if resume and problems.none_in("checkpoint") else "",
                    model=fields.get(role),
                )
    problems.raise_all()

    resources = [plan.resources for plan in plans.values()]
    if config.run.samples:
        resources.append(engine.spec.resources(config.engines[engine.name], engines))
    return Prepared(
        config=config,
        device=device,
        run_dir=run_dir,
        resume=resume,
        state=state,
        roles=plans,
        engine=engine,
        engines=engines,
        seating=arrange(
            groups,
            apart=apart,
            widths=widths,
            cpus=max(each.cpus for each in resources),
            gpus=max(each.gpus for each in resources),
            resources=config.cluster.resources,
        ),
        transport=transport,
        senders=sending,
        tokenizer=tokenizer,
        prompts=prompts,
        reward=reward,
        params=params,
        function=function,
        postprocess=postprocess,
        vocab_size=model.get_text_config().vocab_size,
    )


def require_form(config: Config, engine: Loaded, cluster: ClusterInfo) -> None:
    """Raises ConfigError where weights would travel in another form than the engine, as it is configured, takes."""
    sent, taken = config.weights.quantize, engine.spec.quantized(config.engines[engine.name], cluster)
    if config.run.samples and sent != taken:
        raise ConfigError(
            f"weights.quantize: {sent!r}, and the engine {engine.name!r}, as it is configured, takes {taken!r}; "
            "make them equal"
        )


def transport_of(config: Config, seats: Seating, device: str) -> tuple[str, tuple[int, ...]]:
    """How weights travel, and of each receiver the actor's rank on its device. Plugins are installed."""
    one_machine = device == "cpu" and not config.cluster.address
    places = seats.places
    receivers = [bundle for place in places.get(ENGINES, ()) for bundle in seats.taken(ENGINES, place)]
    sending = senders(receivers, places[ACTOR], one_machine=one_machine)
    support = load(Kind.BACKENDS, backend_name(config, ACTOR)).spec.capabilities.get(Capability.UPDATE_IPC, FULL)
    return choose_transport(config, places, sending, by_handle=support.grade is Grade.FULL), sending


def _resolve_plugins(config: Config, problems: Problems) -> Config:
    """With each plugin's table as its own class, where all plugins are found and their tables fit."""
    for each in selected(config):
        with problems.stage("plugins", path=each.path):
            load(each.kind, each.name)
    if problems.none_in("plugins"):
        with problems.stage("plugins"):
            return resolve_tables(config)
    return config


def _with_absolute_paths(config: Config) -> Config:
    """For processes with another working directory, and for whoever reads the run's config later."""

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
    """`auto` takes cuda where torch sees one on the driver's machine, whatever a cluster at `address` has.

    Raises ConfigError where cuda is asked for and there is none; of a cluster at `address` it is believed.
    """
    if device == "cuda" and address:
        return device
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ConfigError("cluster.device: 'cuda', and torch sees no CUDA device here; use 'cpu' or 'auto'")
    return "cuda" if there and device != "cpu" else "cpu"


def require_room_for_tokens(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, model: ModelConfig, *, table: str = "model"
) -> None:
    """Raises ModelError where a text could become a token that the model has no embedding for.

    A special token that nobody samples or starts with may lie beyond: Gemma 3's text models have a tokenizer with one
    for images, and no embedding for it.
    """
    size = config.get_text_config().vocab_size
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    spare = special - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    token, last = max(
        ((token, index) for token, index in tokenizer.get_vocab().items() if index not in spare),
        key=lambda item: item[1],
        default=("", -1),
    )
    if last >= size:
        what = f"{table}.path: its" if model.path else f"{table}.config.vocab_size: the model's"
        cure = "" if model.path else f"set {table}.config.vocab_size to at least {last + 1}, or "
        raise ModelError(
            f"{what} vocabulary has {size} tokens, and the tokenizer numbers {token!r} {last}, which wants {last + 1}; "
            f"{cure}give the tokenizer of this model as model.tokenizer"
        )


def resume_from(config: Config, run_dir: Path, *, starting: bool) -> Path | None:
    """The checkpoint that the run goes on from. Raises ConfigError rather than write over another run."""
    resume = config.checkpoint.resume
    newest = latest(run_dir)
    if starting and newest is not None and not config.run.trains:
        advice = f", or use: corerl eval {shlex.quote(str(run_dir))}" if config.run.mode == "eval" else ""
        raise ConfigError(
            f"run.dir: {run_dir} already holds a run ({newest.name}), whose numbers run.mode={config.run.mode!r} would "
            f"write over; give another run.dir{advice}"
        )
    if resume == "auto":
        return newest
    chosen = None if resume == "never" else Path(resume).absolute()
    # Retention would take what is there for this run's own, and the next resume would go on from whatever is newest.
    if starting and newest is not None and (chosen is None or chosen.resolve() != newest.resolve()):
        raise ConfigError(
            f"run.dir: {run_dir} already holds a run ({newest.name}); go on with it by checkpoint.resume=auto, "
            "or give another run.dir"
        )
    return chosen


def require_same_source(state: Mapping[str, Any], config: Config, checkpoint: str) -> None:
    """Raises CheckpointError where a run that samples would go on from one that read its batches, or the other way."""
    sampled = "prompts" in state["source"]
    if sampled != config.run.samples:
        raise CheckpointError(
            f"{checkpoint} is of a run that {'sampled its batches' if sampled else 'read saved batches'}, and "
            f"run.mode={config.run.mode!r} does not; resume with the run.mode that it was trained with"
        )


def title(prepared: Prepared) -> str:
    config = prepared.config
    model = Path(config.model.path).name if config.model.path else f"{config.model.config['model_type']} from scratch"
    ranks = [
        f"{len(plan.assignments)} {plan.backend.name} rank{'s' * (len(plan.assignments) != 1)}"
        + (f" for the {role}" if role != ACTOR else "")
        for role, plan in prepared.roles.items()
    ]
    if config.run.samples:
        engines = config.rollout.replicas
        ranks.append(f"{engines} {prepared.engine.name} engine{'s' * (engines != 1)}")
    sources = [each.source for each in config.data.sources] or [config.data.source]
    source = " + ".join(sources) if config.run.samples else config.rollout.saved
    return f"{config.algorithm.name} on {source}: {model}, {', '.join(ranks)}, {prepared.device}"
