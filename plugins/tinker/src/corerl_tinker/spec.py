"""The spec of `corerl serve`, which `corerl --help` reads."""

from __future__ import annotations

from corerl.plugin import CommandSpec
from corerl_tinker.options import ServeOptions

SERVE = CommandSpec(
    implementation="corerl_tinker.cli:add_arguments",
    api=(2, 0),
    config=ServeOptions,  # the table [serve]
    summary="answer the Tinker API, so that recipes of its SDK train and sample here",
)
