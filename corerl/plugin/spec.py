"""Specs, which entry points name: light descriptions of everything that plugins bring, by kind,
importable without torch.

    [project.entry-points."corerl.backends"]
    mine = "corerl_mine:SPEC"

Each kind has a group of its own: `corerl.backends`, `corerl.engines`, `corerl.samplers`, `corerl.extensions`,
`corerl.algorithms`, `corerl.commands`, `corerl.transports`, `corerl.pictures`, `corerl.formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, StrEnum
from typing import Any, Literal, TypeAlias

from attrs import field, frozen
from attrs.validators import in_, matches_re

from corerl.config.schema import AlgorithmConfig, ClusterConfig, ClusterInfo, RewardConfig, RolloutConfig, TrainConfig
from corerl.kinds import InPieces, MemoryKind, ModelSize
from corerl.plugin.capabilities import Capability, Support, support_in

API = (2, 2)  # of the contract between core and plugins


@frozen(kw_only=True)
class NoOptions:
    """Config of a plugin without a table."""


@frozen(kw_only=True)
class Spec:
    """What every plugin says of itself, whatever its kind."""

    api: tuple[int, int]  # the contract that it was written for
    summary: str  # one line
    config: type = NoOptions  # its options: frozen attrs; every field has a default and help text


Environment: TypeAlias = Mapping[str, str]
PATH = matches_re(r"|[^.].*|\.(model|train)(\..+)?|\.(weights|algorithm|rollout)\..+")


@frozen
class Problem:
    """One reason why this config cannot run here.

    `path` is a setting of the plugin's own table, or "" for the whole table. With a leading dot it is the role's:
    ".model.FIELD" is a field of the model's Hugging Face config, ".train.SETTING" a training setting, and ".model" or
    ".train" the whole table, wherever these are in the config. An engine may also name ".weights.SETTING", an algorithm
    ".algorithm.SETTING" and ".rollout.SETTING", a sampler the latter.
    """

    path: str = field(validator=PATH)
    text: str


UNMEASURED = "how much longer a step takes has not been measured"


@frozen(kw_only=True)
class SlowPath:
    """What takes longer than it could, though nothing is wrong. `corerl-forecast` says it before the first step."""

    path: str = field(validator=PATH)  # the setting that decides it, as `Problem.path`
    text: str  # what is slow, and why
    price: str  # how many times as long a step takes, as measured, or UNMEASURED
    instead: str  # what avoids it


class Level(StrEnum):
    """How serious a finding is."""

    OK = "ok"
    WARNING = "warning"  # a run may go wrong
    ERROR = "error"  # a run cannot start, or does the wrong thing


@frozen(kw_only=True)
class Finding:
    """The result of one check by `corerl doctor`. An ok finding needs neither `why` nor `fix`."""

    level: Level
    what: str  # a sentence
    why: str = ""  # why it matters
    fix: str = ""  # the command that fixes it, or what to do if no command does


def ok(what: str) -> Finding:
    """The finding that this is as it should be."""
    return Finding(level=Level.OK, what=what)


class Process(Enum):
    """Where an extension runs."""

    DRIVER = "driver"
    WORKER = "worker"


def _of_all_kinds(given: Mapping[MemoryKind, int]) -> Mapping[MemoryKind, int]:
    return {kind: given.get(kind, 0) for kind in MemoryKind}


@frozen(kw_only=True)
class RankMemory:
    """Bytes that the fullest rank of a role needs on its device."""

    # While the rank is in training; gradients also if they exist only in a step. Kinds that stay on the host are 0.
    kinds: Mapping[MemoryKind, int] = field(converter=_of_all_kinds)
    # Whether a step's first backward pass makes the gradients, in place of the activations that it has used up, and its
    # end drops them.
    gradients_grow: bool = False
    gathered: int = 0  # further in every pass: weights of other ranks, or copies of its own
    reducing: int = 0  # further in a layer's backward pass: gradients on their way
    # The fraction of a micro-batch's activations that one rank holds.
    activations: float = 1.0
    replicated: int = 0  # activations of a micro-batch, further, that are not divided
    fused: bool = False  # layers keep what compiled layers do, not what transformers' code does


def nothing(*_: Any) -> tuple[()]:
    """No problems, findings or slow paths."""
    return ()


def no_environment(config: Any, cluster: ClusterInfo) -> Environment:
    return {}


def all_ranks(config: Any, cluster: ClusterInfo) -> int:
    return cluster.ranks


def one(config: Any, cluster: ClusterInfo) -> int:
    return 1


RANKS_OF_VARIANTS = (2, 4)


@frozen(kw_only=True)
class Variant:
    """Options that change how a backend computes: the conformance suite goes through it with them, besides the
    defaults."""

    name: str  # as in "C43 failed with NAME"
    options: Mapping[str, Any]  # of the backend's own
    # 4 where ranks that share samples are to meet ranks that have others.
    ranks: int = field(default=2, validator=in_(RANKS_OF_VARIANTS))


@frozen(kw_only=True)
class BackendSpec(Spec):
    """What the driver knows of a backend before a worker exists; its module imports no torch."""

    implementation: str  # "package.module:Class", a corerl.backend.Backend; imported in the worker only
    capabilities: Mapping[Capability, Support] = field(factory=dict)  # one that is not named: see `support_in`
    environment: Callable[[Any, ClusterInfo], Environment] = no_environment
    check: Callable[[Any, ClusterInfo], Iterable[Problem]] = nothing
    # The number of data-parallel shards of a step's samples, every rank's `ParallelLayout.dp_size`: fewer than ranks
    # if several have one (tensor, pipeline or context parallelism). Called only if `check` finds no problem.
    data_parallel: Callable[[Any, ClusterInfo], int] = all_ranks
    # What a rank needs on its device; None if unknown. Called only if `check` finds no problem.
    memory: Callable[[Any, ClusterInfo, ModelSize], RankMemory] | None = None
    # The slow paths that a role takes; called by `corerl-forecast`, only on GPUs, and if `check` finds no problem.
    # `slow_attention` yields those of `corerl.ops.packed_attention`.
    slow: Callable[[Any, ClusterInfo, ModelSize], Iterable[SlowPath]] = nothing
    # Findings about the backend's libraries on this machine; `corerl doctor` calls it in a separate process.
    probe: Callable[[], Iterable[Finding]] = nothing
    variants: Sequence[Variant] = ()  # each with a name of its own

    def support(self, capability: Capability) -> Support:
        return support_in(self.capabilities, capability)


@frozen(kw_only=True)
class EngineSpec(Spec):
    """What the driver knows of an engine before its process exists; its module imports no torch."""

    # "package.module:Class", a corerl.engines.Engine, or a function that makes one and may first start what takes as
    # long as the imports, such as a server; imported in the engine's process only.
    implementation: str
    environment: Callable[[Any, ClusterInfo], Environment] = no_environment
    check: Callable[[Any, ClusterInfo], Iterable[Problem]] = nothing
    # The number of `generate` calls a replica answers concurrently, each in its own thread. An asynchronous run makes
    # that many, so the more calls, the fewer prompts in each.
    calls: Callable[[Any, ClusterInfo], int] = one
    # The number of bundles of one replica, adjacent on one machine, each with one device. On each of them a process
    # of the engine holds a part of the model and receives weights. Called only if `check` finds no problem.
    bundles: Callable[[Any, ClusterInfo], int] = one
    # Findings about the engine's libraries on this machine; `corerl doctor` calls it in a separate process.
    probe: Callable[[], Iterable[Finding]] = nothing
    # The values of `weights.quantize` that it takes. "fp8" means the tensors of `corerl.weights.quantize`.
    quantized: tuple[str, ...] = ("none",)
    # Whether it holds adapters separately from the weights, by the names of `corerl.weights.adapters`: in one update
    # with these and in later ones alone (`weights.lora = "adapter"`, `EngineContext.lora`).
    adapters: bool = False
    pictures: bool = False  # whether it shows the model `GenerateRequest.pictures`
    cache_use: bool = False  # whether `Engine.cache_use` says how full its cache is


@frozen(kw_only=True)
class PicturesSpec(Spec):
    """What the driver knows of a reader of pictures before it is constructed; its module imports no torch."""

    implementation: str  # "package.module:Class", a corerl.pictures.PictureReader; imported in the driver only
    inputs: str  # "package.module:Class", a corerl.pictures.PictureInputs; imported in ranks and engines


@frozen(kw_only=True)
class SamplerRun:
    """What a sampler's `check` can know about a run, besides the sampler's own options."""

    rollout: RolloutConfig
    reward: RewardConfig
    engine: EngineSpec | None = None  # of `rollout.engine`; None in tests that need none
    cluster: ClusterConfig = field(factory=ClusterConfig)


@frozen(kw_only=True)
class SamplerSpec(Spec):
    """What the driver knows of a sampler before it is constructed; its module imports no torch. An option `function`,
    if there is one, names code of the user's, as 'module:function'."""

    implementation: str  # "package.module:Class", a corerl.rollout.Sampler; imported in the driver only
    check: Callable[[Any, SamplerRun], Iterable[Problem]] = nothing  # of options that cannot be used
    # The rows that a run has prompts from whose `[data]` names no source, as those of a data file: objects with the
    # fields of `data.prompt_key`, `data.answer_key` and any others, as many as `len` says, each the same in every run.
    prompts: Callable[[Any], Sequence[Mapping[str, Any]]] | None = None  # (options)
    # The reward of a run whose `[reward]` names none, as `reward.name` names one: "module:function". Empty: core's.
    reward: str = ""
    # Whether a sample may have another number of rows than one, or none of the policy's tokens.
    episodes: bool = False


@frozen(kw_only=True)
class ExtensionSpec(Spec):
    """What the driver knows of an extension before it is constructed; its module imports no torch."""

    implementation: str  # "package.module:Class", constructed with (options: config class, run_dir: str)
    process: Process
    check: Callable[[Any, ClusterInfo], Iterable[Problem]] = nothing
    # In which runs it takes part: "listed", where the config lists it; "default", also where the config lists no
    # extensions at all; "always", in every run where it is installed, and a listing only sets its options.
    joins: Literal["listed", "default", "always"] = field(
        default="listed", validator=in_(("listed", "default", "always"))
    )
    place: int = 100  # among those that join by themselves: lower comes first, and is outermost
    traces: bool = False  # on the driver: receives `CallFinished` for every call, so that all processes keep records
    shows_notices: bool = False  # on the driver: shows `Notice` to whoever starts the run
    plans: bool = False  # on the driver: has the hook `plan_ready`, for which it is constructed when a run is planned


@frozen(kw_only=True)
class PlanAnswer:
    """What an extension's `plan_ready` has to say of a plan."""

    # Values of settings to plan again with, by their dotted keys in the config, such as {"train.recompute": "full"}. A
    # table is replaced as a whole. Extensions that set one differently end the planning, and so do settings with which
    # the run cannot be planned.
    settings: Mapping[str, Any] = field(factory=dict)
    # A line each, among a run's first and those of `corerl config check`. If the run is planned again, those of answers
    # that want it stay.
    notices: Sequence[str] = ()
    # A line each, which begins with the setting to change. They end the planning, unless it begins again.
    problems: Sequence[str] = ()


ACTOR = "actor"  # the role whose policy samples


class RoleKind(StrEnum):
    """What a role of an algorithm is."""

    POLICY = "policy"  # a language model, which samples
    CRITIC = "critic"  # a model with a value head
    FROZEN = "frozen"  # a language model that is not trained, such as a teacher: it only passes samples


@frozen(kw_only=True)
class AlgorithmRun:
    """What an algorithm's `check` can know about a run, besides the algorithm's own options."""

    algorithm: AlgorithmConfig  # settled
    rollout: RolloutConfig
    train: TrainConfig  # the actor's
    steps: int  # run.steps


@frozen(kw_only=True)
class AlgorithmSpec(Spec):
    """What the driver knows of an algorithm before it is constructed; its module imports no torch."""

    implementation: str  # "package.module:Class", a corerl.algorithms.Algorithm; imported in the driver only
    # The roles that it needs, the actor among them, each with what it is.
    roles: Mapping[str, RoleKind] = field(factory=lambda: {ACTOR: RoleKind.POLICY})
    # Whether advantages compare the samples of a prompt: then a group of one sample, or of equal rewards, teaches
    # nothing.
    compares: bool = True
    # Whether the advantages of a prompt's samples depend on these alone: then gradients may begin before a batch is
    # whole (rollout.source = "streamed").
    by_prompt: bool = False
    # Whether a token is credited with later rewards: then each turn of an episode has its reward at its last token.
    # Otherwise their sum is the episode's reward.
    credits_turns: bool = False
    samples: bool = True  # False: it learns from saved batches only
    # What it sets of `[algorithm]` where the config leaves that unset, of the settings that may be: aggregation,
    # dynamic_sampling, old_logprobs, overlong.
    defaults: Mapping[str, Any] = field(factory=dict)
    check: Callable[[Any, AlgorithmRun], Iterable[Problem]] = nothing  # of what contradicts it in a run


@frozen(kw_only=True)
class CommandSpec(Spec):
    """A command of `corerl`: what `corerl --help` shows of it, and where its code is."""

    # "package.module:function", which gets the command's `argparse.ArgumentParser`, adds arguments, and sets `run`, a
    # function of the parsed arguments that returns the exit status: `parser.set_defaults(run=run)`. Imported only when
    # the command is chosen, also with --help.
    implementation: str
    # "package.module:function", for a command with a table of its own in a TOML file, the `config` of this spec under
    # the command's name: gets the file and the overrides of `corerl config check`, in place of its checks of a run,
    # raises UserError with a line for each problem, and returns lines to be shown.
    check: str = ""


@frozen(kw_only=True)
class FormatSpec(Spec):
    """A reader of data files that are no JSON lines, and of directories of files."""

    # "package.module:function", called with (files or a directory, its name in messages, split, subset, common, texts),
    # those from `split` on by name and not of files, but for `texts`; returns a corerl.data.Rows. Imported where they
    # are read.
    implementation: str
    suffixes: tuple[str, ...]  # of the files that it reads, such as ".parquet"
    # "package.module:function", called with (prompts, a checkpoint's state, seed) for rows that are not the
    # checkpoint's, or in another order: divides them into training and held-out ones as the checkpoint did. Returns
    # lines for the user, and how they differ so that the run cannot go on; "" if it can. Empty: there is none.
    resumes: str = ""


@frozen(kw_only=True)
class TransportSpec(Spec):
    """What a run knows of a weight transport before its two ends exist; its module imports no torch."""

    sender: str  # "package.module:Class", a corerl.weights.WeightSender, constructed with (address, rank) on every rank
    receiver: str  # "package.module:Class", a corerl.weights.Receiver, constructed with (address, index) by an engine
    capability: Capability  # required of the backend
    check: Callable[[Any, ClusterInfo], Iterable[Problem]] = nothing
    one_device: bool = False  # both ends access the same device memory
    one_group: bool = False  # both ends join a process group, meeting at the address
    # "package.module:function", called by the driver with the address of ranks that have failed or ended: ends the
    # receivers' wait if they do not notice that themselves, and never raises. Empty if they do.
    abandon: str = ""


# ---- what specs of several plugins share -----------------------------------------------------------------------------


Version = tuple[int, ...]

REINSTALL_TORCH = "python -m pip install --force-reinstall torch"


def check_library(
    name: str, distribution: str, *, oldest: Version, end: Version, why: str, fix: str, plugin: str = "backend"
) -> Finding:
    """Whether the library underneath a plugin is installed in a version v with `oldest` <= v < `end`; `why` says why
    other versions will not do. `plugin` is backend or engine."""
    from importlib import metadata  # slow to import, and every spec imports this module

    try:
        installed = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return Finding(level=Level.ERROR, what=f"{name} is not installed", why=f"this {plugin} is built on it", fix=fix)
    if oldest <= version_numbers(installed)[: len(oldest)] and version_numbers(installed)[: len(end)] < end:
        return ok(f"{name} {installed} is supported by this {plugin}")
    return Finding(
        level=Level.ERROR,
        what=f"{name} {installed} is not supported by this {plugin}",
        why=why,
        fix=fix,
    )


def version_numbers(text: str) -> Version:
    """The numbers of a version: 2.13.0+cpu is (2, 13, 0), and 0.17.0rc1 (0, 17, 0), as its release will be."""
    from packaging.version import InvalidVersion, Version  # slow to import, as above

    try:
        return Version(text).release
    except InvalidVersion:  # no number is as low
        return ()


def check_nccl(*, gpus: bool, available: bool) -> Iterator[Finding]:
    """An error finding if torch sees GPUs but has no NCCL for ranks on them to communicate."""
    if gpus and not available:
        yield Finding(
            level=Level.ERROR,
            what="torch sees CUDA devices, but torch.distributed has no NCCL",
            why="ranks on GPUs communicate through it",
            fix=REINSTALL_TORCH,
        )


# Prices are of whole steps, of `python -m benchmarks.train_step` on an H100: docs/models.md has the table of all.
IN_PIECES: Mapping[InPieces, str] = {
    InPieces.HEADS: "a step takes 1.2 times as long",
    InPieces.SINKS: "a step takes 1.1 times as long",
    InPieces.CAPS: "a step takes 1.2 times as long",
    InPieces.STATE: UNMEASURED,
}


def slow_attention(cluster: ClusterInfo, size: ModelSize) -> Iterator[SlowPath]:
    """What packed attention costs where it is more than one kernel for the sake of the model."""
    packed = cluster.train is None or cluster.train.layout != "whole"
    why = size.in_pieces
    if packed and why is not None and why in IN_PIECES:
        yield SlowPath(
            path=".model",
            text=f"attention runs on padded rows instead of one kernel over packed tokens, because {why}",
            price=IN_PIECES[why],
            instead="no setting avoids it, only another model",
        )
