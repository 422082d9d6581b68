"""The spec and options of the extension that comes with core; imports no torch."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from corerl.config.options import option
from corerl.plugin.spec import ExtensionSpec, Process


@frozen(kw_only=True)
class JsonlOptions:
    samples: Literal["none", "shown", "all"] = option(
        "sampled answers that samples.jsonl gets; shown: three of each step and of each evaluation, which the console "
        "shows too; all: every one",
        default="shown",
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
