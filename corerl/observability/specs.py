"""What entry points name for the extensions that come with CoreRL; imports neither torch, rich nor matplotlib, and
neither of the trackers' packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any, Literal

from attrs import Attribute, field, frozen, validators

from corerl.config.schema import ClusterInfo
from corerl.observability.chosen import steps_chosen
from corerl.plugin.spec import ExtensionSpec, Problem, Process


def _option(help: str, *, default: Any, **kwargs: Any) -> Any:  # noqa: A002  -- the word that the user reads
    return field(default=default, metadata={"help": help}, **kwargs)


@frozen(kw_only=True)
class ConsoleOptions:
    every: int = _option(
        "rollout steps between lines where the output is no terminal", default=10, validator=validators.ge(1)
    )


@frozen(kw_only=True)
class JsonlOptions:
    samples: bool = _option("also write the answers that are shown to samples.jsonl", default=True)


@frozen(kw_only=True)
class TensorboardOptions:
    samples_every: int = _option(
        "rollout steps between sampled answers as text; 0 only held-out ones", default=25, validator=validators.ge(0)
    )


@frozen(kw_only=True)
class CurvesOptions:
    every: int = _option(
        "rollout steps between drawings; 0 draws only at the end", default=100, validator=validators.ge(0)
    )


@frozen(kw_only=True)
class TraceOptions:
    """There is nothing to choose."""


def _steps(_: Any, attribute: Attribute[Any], value: str) -> None:
    steps_chosen(value)  # raises ValueError where it is no list of steps


@frozen(kw_only=True)
class ProfilerOptions:
    steps: str = _option(
        "optimizer steps to profile: some of them as '3' or '3,20', or 'FIRST:LAST:EVERY', LAST included and ':EVERY' "
        "left out for each",
        default="2:3",
        validator=_steps,
    )
    ranks: tuple[int, ...] = _option("of each role, that profile; [] all", default=(0,))
    with_stack: bool = _option("note where in the source each operation was called", default=False)
    record_shapes: bool = _option("note the shapes of each operation's inputs", default=False)
    profile_memory: bool = _option("note what each operation allocates", default=False)
    rows: int = _option("lines of the table beside each trace", default=25, validator=validators.ge(1))


@frozen(kw_only=True)
class MemoryOptions:
    ranks: tuple[int, ...] = _option("of each role, that write their peaks; [] all", default=())
    snapshots: str = _option(
        "optimizer steps whose allocations on a CUDA device are recorded, written as the profiler's `steps`; '' none",
        default="",
        validator=_steps,
    )
    on_out_of_memory: bool = _option(
        "record all allocations on a CUDA device, and write them when it has no memory left", default=False
    )
    max_entries: int = _option(
        "allocations and releases that a record holds, newest kept", default=100_000, validator=validators.ge(1)
    )


@frozen(kw_only=True)
class NanGuardOptions:
    action: Literal["raise", "log"] = _option(
        "raise: end the run, with what was found first; log: count it in the metric `nonfinite`, and go on",
        default="raise",
    )
    inputs: bool = _option("look at each column of the batch; it is packed once more for that", default=True)
    parameters: bool = _option(
        "also look at the parameters, after each optimizer step; takes as long as reading them all",
        default=False,
    )


@frozen(kw_only=True)
class WandbOptions:
    project: str = _option("empty leaves it to WANDB_PROJECT, then to W&B", default="")
    entity: str = _option("team or user; empty leaves it to WANDB_ENTITY, then to W&B", default="")
    name: str = _option("of the run; empty takes its directory's", default="")
    group: str = _option("of runs that belong together", default="")
    tags: tuple[str, ...] = _option("of the run", default=())
    mode: Literal["", "online", "offline", "disabled"] = _option(
        "offline writes below the run's directory, for `wandb sync`; empty leaves it to WANDB_MODE, then to online",
        default="",
    )
    samples_every: int = _option(
        "rollout steps between tables of sampled answers; 0 only held-out ones", default=25, validator=validators.ge(0)
    )


@frozen(kw_only=True)
class MlflowOptions:
    tracking_uri: str = _option(
        "such as http://host:5000, or file:/a/directory; empty leaves it to MLFLOW_TRACKING_URI, then takes "
        "mlruns in the run's directory",
        default="",
    )
    experiment: str = _option("is made where it does not exist", default="corerl", validator=validators.min_len(1))
    name: str = _option("of the run; empty takes its directory's", default="")
    tags: Mapping[str, str] = field(metadata={"help": "of the run"}, factory=dict)
    samples_every: int = _option(
        "rollout steps between artifacts of sampled answers; 0 only held-out ones",
        default=25,
        validator=validators.ge(0),
    )


def _needs(package: str, extra: str) -> Any:
    """A spec's `check` that the package is installed."""

    def check(options: Any, cluster: ClusterInfo) -> Iterable[Problem]:
        found = find_spec(package)
        # A directory of that name, such as the one that W&B itself writes to, is found as a package without a file.
        if found is None or found.origin is None:
            yield Problem("", f"the package {package!r} is not installed; pip install 'corerl[{extra}]'")

    return check


CONSOLE = ExtensionSpec(
    implementation="corerl.observability.console:Console",
    config=ConsoleOptions,
    api=(1, 0),
    summary="a live display on a terminal, aligned lines in a pipe or log file",
    process=Process.DRIVER,
)
JSONL = ExtensionSpec(
    implementation="corerl.observability.jsonl:Jsonl",
    config=JsonlOptions,
    api=(1, 0),
    summary="metrics.jsonl and samples.jsonl in the run directory",
    process=Process.DRIVER,
)
TENSORBOARD = ExtensionSpec(
    implementation="corerl.observability.tensorboard:Tensorboard",
    config=TensorboardOptions,
    api=(1, 0),
    summary="TensorBoard events in the run directory",
    process=Process.DRIVER,
)
CURVES = ExtensionSpec(
    implementation="corerl.observability.curves:Curves",
    config=CurvesOptions,
    api=(1, 0),
    summary="curves.png in the run directory",
    process=Process.DRIVER,
)
TRACE = ExtensionSpec(
    implementation="corerl.observability.trace:Trace",
    config=TraceOptions,
    api=(1, 0),
    summary="trace.json in the run directory: what every process does when, for Perfetto",
    process=Process.DRIVER,
    traces=True,
)
PROFILER = ExtensionSpec(
    implementation="corerl.observability.profiler:Profiler",
    config=ProfilerOptions,
    api=(1, 0),
    summary="torch's profiler on chosen optimizer steps and ranks, in the run directory's profile/",
    process=Process.WORKER,
)
MEMORY = ExtensionSpec(
    implementation="corerl.observability.memory_recorder:MemoryRecorder",
    config=MemoryOptions,
    api=(1, 0),
    summary="the peak of each hook call, and torch's memory snapshots, in the run directory's memory/",
    process=Process.WORKER,
)
NAN_GUARD = ExtensionSpec(
    implementation="corerl.observability.nan_guard:NanGuard",
    config=NanGuardOptions,
    api=(1, 0),
    summary="says where the first number that is not finite comes in, and ends the run",
    process=Process.WORKER,
)
WANDB = ExtensionSpec(
    implementation="corerl.observability.weights_and_biases:WeightsAndBiases",
    config=WandbOptions,
    api=(1, 0),
    summary="metrics, config and answers to Weights & Biases",
    process=Process.DRIVER,
    check=_needs("wandb", "wandb"),
)
MLFLOW = ExtensionSpec(
    implementation="corerl.observability.mlflow_tracking:Mlflow",
    config=MlflowOptions,
    api=(1, 0),
    summary="metrics, config and answers to MLflow",
    process=Process.DRIVER,
    check=_needs("mlflow", "mlflow"),
)
