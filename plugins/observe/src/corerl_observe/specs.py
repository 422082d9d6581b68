"""The specs and options of this wheel's extensions; imports neither torch, rich, matplotlib nor the
trackers' packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any, Literal

from attrs import Attribute, frozen
from attrs.validators import min_len

from corerl.config import ClusterInfo, at_least, option
from corerl.messages import install_hint
from corerl.plugin import ExtensionSpec, NoOptions, Problem, Process
from corerl_observe.step_ranges import step_ranges


@frozen(kw_only=True)
class ConsoleOptions:
    every: int = option(
        "rollout steps between lines when the output is not a terminal; slow steps and phases get a line every 20 s",
        default=10,
        validator=at_least(1),
    )


@frozen(kw_only=True)
class TensorboardOptions:
    samples_every: int = option(
        "rollout steps between sampled answers as text; 0 writes only held-out ones", default=25, validator=at_least(0)
    )


@frozen(kw_only=True)
class CurvesOptions:
    every: int = option("rollout steps between plots; 0 plots only at the end", default=100, validator=at_least(0))


def _steps(_: Any, attribute: Attribute[Any], value: str) -> None:
    step_ranges(value)  # raises ValueError if it is not a list of steps


@frozen(kw_only=True)
class ProfilerOptions:
    steps: str = option(
        "optimizer steps to profile: '3', '3,20', or 'FIRST:LAST:EVERY' (LAST included, ':EVERY' optional)",
        default="2:3",
        validator=_steps,
    )
    ranks: tuple[int, ...] = option("ranks of each role to profile; [] means all", default=(0,))
    with_stack: bool = option("record the source location of each operation", default=False)
    record_shapes: bool = option("record the input shapes of each operation", default=False)
    profile_memory: bool = option("record the memory that each operation allocates", default=False)
    rows: int = option("rows of the table written with each trace", default=25, validator=at_least(1))


@frozen(kw_only=True)
class MemoryOptions:
    ranks: tuple[int, ...] = option("ranks of each role that write their peaks; [] means all", default=())
    snapshots: str = option(
        "optimizer steps whose CUDA allocations are recorded, in the format of the profiler's `steps`; '' records none",
        default="",
        validator=_steps,
    )
    on_out_of_memory: bool = option(
        "record all CUDA allocations, and write them when the device runs out of memory", default=False
    )
    max_entries: int = option(
        "allocations and releases that a record holds, the newest", default=100_000, validator=at_least(1)
    )


@frozen(kw_only=True)
class NanGuardOptions:
    action: Literal["raise", "log"] = option(
        "raise: end the run at the first finding; log: count findings in the metric `nonfinite` and continue",
        default="raise",
    )
    inputs: bool = option("check each column of the batch, which is packed once more for this", default=True)
    parameters: bool = option(
        "also check the parameters after each optimizer step; takes one read of all of them",
        default=False,
    )


@frozen(kw_only=True)
class WandbOptions:
    project: str = option("project; empty uses WANDB_PROJECT, then W&B's default", default="")
    entity: str = option("team or user; empty uses WANDB_ENTITY, then W&B's default", default="")
    name: str = option("name of the run; empty uses the name of its directory", default="")
    group: str = option("group of related runs", default="")
    tags: tuple[str, ...] = option("tags of the run", default=())
    mode: Literal["", "online", "offline", "disabled"] = option(
        "offline writes to the run's directory, for `wandb sync`; empty uses WANDB_MODE, then online",
        default="",
    )
    samples_every: int = option(
        "rollout steps between tables of sampled answers; 0 logs only held-out ones", default=25, validator=at_least(0)
    )


@frozen(kw_only=True)
class MlflowOptions:
    tracking_uri: str = option(
        "tracking server, such as http://host:5000 or file:/a/directory; empty uses MLFLOW_TRACKING_URI, then mlruns "
        "in the run's directory",
        default="",
    )
    experiment: str = option("experiment; created if it does not exist", default="corerl", validator=min_len(1))
    name: str = option("name of the run; empty uses the name of its directory", default="")
    tags: Mapping[str, str] = option("tags of the run", factory=dict)
    samples_every: int = option(
        "rollout steps between artifacts of sampled answers; 0 logs only held-out ones",
        default=25,
        validator=at_least(0),
    )


def _needs(package: str) -> Any:
    """A spec's `check` that the package is installed; CoreRL's extra has the same name."""

    def check(options: Any, cluster: ClusterInfo) -> Iterable[Problem]:
        found = find_spec(package)
        # A directory of that name, such as the one W&B writes to, is found as a package without a file.
        if found is None or found.origin is None:
            yield Problem("", f"the package {package!r} is not installed; {install_hint(package)}")

    return check


def _spec(where: str, config: type, summary: str, *, process: Process = Process.DRIVER, **more: Any) -> ExtensionSpec:
    """A spec; `where` is the class as "module:Class" in this package."""
    code = f"corerl_observe.{where}"
    return ExtensionSpec(implementation=code, config=config, api=(2, 0), summary=summary, process=process, **more)


CONSOLE = _spec(
    "console:Console",
    ConsoleOptions,
    "aligned lines, or numbers, curves and answers on a terminal of 80 columns or more",
    shows_notices=True,
    joins="default",
    place=10,
)
TENSORBOARD = _spec(
    "tensorboard:Tensorboard",
    TensorboardOptions,
    "TensorBoard events in the run directory",
    joins="default",
    place=30,
)
CURVES = _spec("curves:Curves", CurvesOptions, "curves.png in the run directory", joins="default", place=40)
TRACE = _spec(
    "trace:Trace",
    NoOptions,
    "trace.json in the run directory: timeline of every process, for Perfetto",
    traces=True,
)
PROFILER = _spec(
    "profiler:Profiler",
    ProfilerOptions,
    "torch's profiler on chosen optimizer steps and ranks, in the run directory's profile/",
    process=Process.WORKER,
)
HOOKS = _spec(
    "hooks:HookTrace",
    NoOptions,
    "a line for each call of a backend's hook and each result, in the run directory's hooks/",
    process=Process.WORKER,
)
MEMORY = _spec(
    "memory_recorder:MemoryRecorder",
    MemoryOptions,
    "the peak of each hook call, and torch's memory snapshots, in the run directory's memory/",
    process=Process.WORKER,
)
NAN_GUARD = _spec(
    "nan_guard:NanGuard",
    NanGuardOptions,
    "reports where the first non-finite number appears, and ends the run",
    process=Process.WORKER,
)
WANDB = _spec(
    "weights_and_biases:WeightsAndBiases",
    WandbOptions,
    "metrics, config and answers to Weights & Biases",
    check=_needs("wandb"),
)
MLFLOW = _spec("mlflow_tracking:Mlflow", MlflowOptions, "metrics, config and answers to MLflow", check=_needs("mlflow"))
