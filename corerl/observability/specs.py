"""What entry points name for the extensions that come with CoreRL; imports neither torch, rich nor matplotlib."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen, validators

from corerl.plugin.spec import ExtensionSpec, Process


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
