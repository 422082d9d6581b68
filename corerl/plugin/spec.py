"""What an entry point names: a light description of a backend, an engine or an extension, importable without torch.

    [project.entry-points."corerl.backends"]
    mine = "corerl_mine:SPEC"

Engines stand under `corerl.engines`, extensions under `corerl.extensions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, StrEnum
from typing import Any, TypeAlias

from attrs import field, frozen
from attrs.validators import in_, matches_re

from corerl.config.schema import ClusterInfo
from corerl.plugin.capabilities import FULL, Capability, Support

Environment: TypeAlias = Mapping[str, str]


@frozen
class Problem:
    """One reason why this config cannot run here.

    `path` is a setting of the plugin's own table, or "" for the table. With a dot before it, it is the role's:
    ".model.FIELD" of its model's Hugging Face config, ".train.SETTING" of what it is trained with, or ".model" or
    ".train" as a whole, wherever in the config these stand. An engine may also name ".weights.SETTING".
    """

    path: str = field(validator=matches_re(r"|[^.].*|\.(model|train)(\..+)?|\.weights\..+"))
    text: str


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"  # a run may go wrong
    ERROR = "error"  # a run cannot start, or does something else than it should


@frozen(kw_only=True)
class Finding:
    """One thing that `corerl doctor` has looked at. What is ok needs no `why` and no `mend`."""

    level: Level
    what: str  # a sentence
    why: str = ""  # it matters
    mend: str = ""  # the command that mends it, or what to do where no command does


def ok(what: str) -> Finding:
    return Finding(level=Level.OK, what=what)


@frozen(kw_only=True)
class Resources:
    """What one rank, or one engine replica, takes of its bundle."""

    cpus: float = 1.0
    # 1 where the device is cuda, else 0; the placement makes fractions of it.
    gpus: float = field(default=0.0, validator=in_((0.0, 1.0)))


class Process(Enum):
    """Where an extension lives."""

    DRIVER = "driver"
    WORKER = "worker"


def no_environment(config: Any, cluster: ClusterInfo) -> Environment:
    return {}


def one_device(config: Any, cluster: ClusterInfo) -> Resources:
    return Resources(cpus=1.0, gpus=1.0 if cluster.device == "cuda" else 0.0)


def all_ranks(config: Any, cluster: ClusterInfo) -> int:
    return cluster.ranks


def one(config: Any, cluster: ClusterInfo) -> int:
    return 1


def not_quantized(config: Any, cluster: ClusterInfo) -> str:
    return "none"


def no_problems(config: Any, cluster: ClusterInfo) -> Iterable[Problem]:
    return ()


def no_findings() -> Iterable[Finding]:
    return ()


@frozen(kw_only=True)
class BackendSpec:
    implementation: str  # "package.module:Class", a corerl.backend.Backend; imported in the worker only
    config: type  # frozen attrs; every field has a default and help text
    api: tuple[int, int]  # the backend API it was written for
    summary: str
    capabilities: Mapping[Capability, Support] = field(factory=dict)  # what is not named counts as FULL
    environment: Callable[[Any, ClusterInfo], Environment] = no_environment
    resources: Callable[[Any, ClusterInfo], Resources] = one_device
    check: Callable[[Any, ClusterInfo], Iterable[Problem]] = no_problems
    # Into how many parts the samples of a step are split over the ranks, `ParallelLayout.dp_size` of each: fewer than
    # ranks where several share a part (tensor, pipeline, context parallel). Asked where `check` has found nothing.
    data_parallel: Callable[[Any, ClusterInfo], int] = all_ranks
    # What is to be said of its libraries on this machine; `corerl doctor` calls it in a process of its own.
    probe: Callable[[], Iterable[Finding]] = no_findings

    def support(self, capability: Capability) -> Support:
        """What it declares of one."""
        return self.capabilities.get(capability, FULL)


@frozen(kw_only=True)
class EngineSpec:
    implementation: str  # "package.module:Class", a corerl.rollout.engine.Engine; imported in the engine's process only
    config: type
    api: tuple[int, int]
    summary: str
    environment: Callable[[Any, ClusterInfo], Environment] = no_environment
    resources: Callable[[Any, ClusterInfo], Resources] = one_device
    check: Callable[[Any, ClusterInfo], Iterable[Problem]] = no_problems
    # Calls of `generate` that a replica answers side by side, each in a thread of its own: an asynchronous run makes as
    # many, of few prompts each where these are many.
    calls: Callable[[Any, ClusterInfo], int] = one
    # Bundles of one replica, neighbours on one machine, each as `resources` says. On each of them a process of the
    # engine holds a part of the model, and receives weights. Asked where `check` has found nothing.
    bundles: Callable[[Any, ClusterInfo], int] = one
    # What is to be said of its libraries on this machine; `corerl doctor` calls it in a process of its own.
    probe: Callable[[], Iterable[Finding]] = no_findings
    # The form in which it takes weights, as `weights.quantize` names it: the run's must be the same. "fp8" comes as the
    # tensors of `corerl.weights.quantize`.
    quantized: Callable[[Any, ClusterInfo], str] = not_quantized


@frozen(kw_only=True)
class ExtensionSpec:
    implementation: str  # "package.module:Class", constructed with (options: config class, run_dir: str)
    config: type
    api: tuple[int, int]
    summary: str
    process: Process
    check: Callable[[Any, ClusterInfo], Iterable[Problem]] = no_problems
    traces: bool = False  # on the driver: hears `Worked` of every call, for which all processes then keep records


Spec: TypeAlias = BackendSpec | EngineSpec | ExtensionSpec
