"""The specs of the extension and of `corerl scale`, which CoreRL reads before anything starts."""

from __future__ import annotations

from collections.abc import Iterable

from corerl.config import ClusterInfo, imported
from corerl.errors import ConfigError
from corerl.plugin import CommandSpec, ExtensionSpec, Problem, Process
from corerl_elastic.config import ElasticOptions


def check(options: ElasticOptions, cluster: ClusterInfo) -> Iterable[Problem]:
    if options.scaler:
        try:
            imported(options.scaler, setting="scaler")
        except ConfigError as error:
            yield Problem("scaler", error.message.removeprefix("scaler: "))


SPEC = ExtensionSpec(
    implementation="corerl_elastic.extension:Elastic",
    config=ElasticOptions,
    api=(2, 0),
    summary="resizing by `corerl scale` or a scaler, and spare machines or smaller groups where a machine is lost",
    process=Process.DRIVER,
    check=check,
    joins="always",
    plans=True,
)
SCALE = CommandSpec(
    implementation="corerl_elastic.scale:add_arguments",
    api=(2, 0),
    summary="change the numbers of ranks and engines of a running run",
)
