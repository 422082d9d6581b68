"""What ranks and engines import, known before a run's plan is made. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from corerl.config.schema import Config
from corerl.errors import CorerlError
from corerl.plan.check import require_no_code_of_a_model
from corerl.plan.environment import environment_of, process_environment
from corerl.plan.resolve import selected
from corerl.plugin.registry import Kind, load

# Of ranks and engines, and what Ray's workers import of other libraries: Ray itself takes no fork.
PROCESSES = ("corerl.trainer.worker", "corerl.engines.service", "jsonschema", "requests")


@frozen(kw_only=True)
class Preload:
    """What a process that others are forked from imports, and with which variables."""

    modules: tuple[str, ...] = ()  # none where processes cannot be forked
    environment: Mapping[str, str] = field(factory=dict, repr=False)  # may hold secrets


def preload_of(config: Config) -> Preload:
    """For `corerl.cluster.forks.fork_server`. Ranks and engines are forked on CPUs alone, as libraries of GPUs are not
    made for that, and by a Ray of the run's own. Those of a plugin that wants variables of its own start as usual."""
    cluster = config.cluster
    if cluster.address or cluster.device != "cpu":
        return Preload()
    try:
        require_no_code_of_a_model(config)  # first: plugins may be modules of the working directory
        common = process_environment(cluster, device=cluster.device, transport=None)
        environment = environment_of("", {}, cluster=cluster, common=common)
        used = [each for each in selected(config) if each.used and each.kind in (Kind.BACKENDS, Kind.ENGINES)]
        plugins = [load(each.kind, each.name).spec.implementation.partition(":")[0] for each in used]
    except (CorerlError, KeyError):  # the plan says all that is wrong
        return Preload()
    return Preload(modules=(*PROCESSES, *plugins), environment=environment)
