"""The spec of `corerl serve`, which `corerl --help` reads."""

from __future__ import annotations

from corerl.plugin import CommandSpec
from corerl_tinker.options import ServeOptions

SERVE = CommandSpec(
    implementation="corerl_tinker.cli:add_arguments",
    check="corerl_tinker.cli:check",
    api=(2, 2),
    config=ServeOptions,  # the table [serve]
    summary="answer the Tinker API, so that recipes of its SDK train and sample here",
)
