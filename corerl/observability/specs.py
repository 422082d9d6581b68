"""The specs and options of the extensions that come with CoreRL; imports neither torch, rich, matplotlib nor the
trackers' packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any, Literal

from attrs import Attribute, frozen
from attrs.validators import min_len

from corerl.config.schema import ClusterInfo, at_least, option
from corerl.observability.chosen import steps_chosen
from corerl.plugin.spec import ExtensionSpec, Problem, Process


@frozen(kw_only=True)
class ConsoleOptions:
    every: int = option(
        "rollout steps between lines where the output is no terminal; slow steps have one every 20 s",
        default=10,
        validator=at_least(1),
    )


@frozen(kw_only=True)
class JsonlOptions:
    samples: bool = option("also write the answers that are shown to samples.jsonl", default=True)


@frozen(kw_only=True)
class TensorboardOptions:
    samples_every: int = option(
        "rollout steps between sampled answers as text; 0 only held-out ones", default=25, validator=at_least(0)
    )


@frozen(kw_only=True)
class CurvesOptions:
    every: int = option("rollout steps between drawings; 0 draws only at the end", default=100, validator=at_least(0))


@frozen(kw_only=True)
class TraceOptions:
    """No options."""


def _steps(_: Any, attribute: Attribute[Any], value: str) -> None:
    steps_chosen(value)  # raises ValueError if it is not a list of steps


@frozen(kw_only=True)
class ProfilerOptions:
    steps: str = option(
        "optimizer steps to profile: some of them as '3' or '3,20', or 'FIRST:LAST:EVERY', LAST included and ':EVERY' "
        "left out for each",
        default="2:3",
        validator=_steps,
    )
    ranks: tuple[int, ...] = option("of each role, that profile; [] all", default=(0,))
    with_stack: bool = option("note where in the source each operation was called", default=False)
    record_shapes: bool = option("note the shapes of each operation's inputs", default=False)
    profile_memory: bool = option("note what each operation allocates", default=False)
    rows: int = option("lines of the table beside each trace", default=25, validator=at_least(1))


@frozen(kw_only=True)
class MemoryOptions:
    ranks: tuple[int, ...] = option("of each role, that write their peaks; [] all", default=())
    snapshots: str = option(
        "optimizer steps whose allocations on a CUDA device are recorded, written as the profiler's `steps`; '' none",
        default="",
        validator=_steps,
    )
    on_out_of_memory: bool = option(
        "record all allocations on a CUDA device, and write them when it has no memory left", default=False
    )
    max_entries: int = option(
        "allocations and releases that a record holds, newest kept", default=100_000, validator=at_least(1)
    )


@frozen(kw_only=True)
class NanGuardOptions:
    action: Literal["raise", "log"] = option(
        "raise: end the run, with what was found first; log: count it in the metric `nonfinite`, and go on",
        default="raise",
    )
    inputs: bool = option("look at each column of the batch; it is packed once more for that", default=True)
    parameters: bool = option(
        "also look at the parameters, after each optimizer step; takes as long as reading them all",
        default=False,
    )


@frozen(kw_only=True)
class WandbOptions:
    project: str = option("empty leaves it to WANDB_PROJECT, then to W&B", default="")
    entity: str = option("team or user; empty leaves it to WANDB_ENTITY, then to W&B", default="")
    name: str = option("of the run; empty takes its directory's", default="")
    group: str = option("of runs that belong together", default="")
    tags: tuple[str, ...] = option("of the run", default=())
    mode: Literal["", "online", "offline", "disabled"] = option(
        "offline writes below the run's directory, for `wandb sync`; empty leaves it to WANDB_MODE, then to online",
        default="",
    )
    samples_every: int = option(
        "rollout steps between tables of sampled answers; 0 only held-out ones", default=25, validator=at_least(0)
    )


@frozen(kw_only=True)
class MlflowOptions:
    tracking_uri: str = option(
        "such as http://host:5000, or file:/a/directory; empty leaves it to MLFLOW_TRACKING_URI, then takes "
        "mlruns in the run's directory",
        default="",
    )
    experiment: str = option("is made where it does not exist", default="corerl", validator=min_len(1))
    name: str = option("of the run; empty takes its directory's", default="")
    tags: Mapping[str, str] = option("of the run", factory=dict)
    samples_every: int = option(
        "rollout steps between artifacts of sampled answers; 0 only held-out ones",
        default=25,
        validator=at_least(0),
    )


def _needs(package: str) -> Any:
    """A spec's `check` that the package is installed; CoreRL's extra has the same name."""

    def check(options: Any, cluster: ClusterInfo) -> Iterable[Problem]:
        found = find_spec(package)
        # A directory of that name, such as the one W&B writes to, is found as a package without a file.
        if found is None or found.origin is None:
            yield Problem("", f"the package {package!r} is not installed; pip install 'corerl[{package}]'")

    return check


def _spec(where: str, config: type, summary: str, *, process: Process = Process.DRIVER, **more: Any) -> ExtensionSpec:
    """A spec; `where` is the class as "module:Class" in this package."""
    code = f"corerl.observability.{where}"
    return ExtensionSpec(implementation=code, config=config, api=(1, 0), summary=summary, process=process, **more)


CONSOLE = _spec("console:Console", ConsoleOptions, "a live display on a terminal, aligned lines in a pipe or log file")
JSONL = _spec("jsonl:Jsonl", JsonlOptions, "metrics.jsonl and samples.jsonl in the run directory")
TENSORBOARD = _spec("tensorboard:Tensorboard", TensorboardOptions, "TensorBoard events in the run directory")
CURVES = _spec("curves:Curves", CurvesOptions, "curves.png in the run directory")
TRACE = _spec(
    "trace:Trace",
    TraceOptions,
    "trace.json in the run directory: what every process does when, for Perfetto",
    traces=True,
)
PROFILER = _spec(
    "profiler:Profiler",
    ProfilerOptions,
    "torch's profiler on chosen optimizer steps and ranks, in the run directory's profile/",
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
    "says where the first number that is not finite comes in, and ends the run",
    process=Process.WORKER,
)
WANDB = _spec(
    "weights_and_biases:WeightsAndBiases",
    WandbOptions,
    "metrics, config and answers to Weights & Biases",
    check=_needs("wandb"),
)
MLFLOW = _spec("mlflow_tracking:Mlflow", MlflowOptions, "metrics, config and answers to MLflow", check=_needs("mlflow"))
