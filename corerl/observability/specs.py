"""The specs and options of the extensions that come with core; imports no torch."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from corerl.config.options import at_least, option
from corerl.plugin.spec import ExtensionSpec, Process


@frozen(kw_only=True)
class ConsoleOptions:
    every: int = option(
        "rollout steps between lines when the output is not a terminal; slow steps and phases get a line every 20 s",
        default=10,
        validator=at_least(1),
    )


@frozen(kw_only=True)
class JsonlOptions:
    samples: Literal["none", "shown", "all"] = option(
        "sampled answers that samples.jsonl gets; shown: three of each step and of each evaluation, which the console "
        "shows too; all: every one",
        default="shown",
    )


CONSOLE = ExtensionSpec(
    implementation="corerl.observability.console:Console",
    config=ConsoleOptions,
    api=(2, 0),
    summary="aligned lines, or on a terminal the display that is installed",
    process=Process.DRIVER,
    shows_notices=True,
    joins="default",
    place=10,
)
JSONL = ExtensionSpec(
    implementation="corerl.observability.jsonl:Jsonl",
    config=JsonlOptions,
    api=(2, 0),
    summary="metrics.jsonl and samples.jsonl in the run directory",
    process=Process.DRIVER,
    joins="default",
    place=20,
)
