"""The environment of a run's processes: what all of them get, what the user and a plugin want, and what ranks and
engines import. Importing this loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from attrs import field, frozen

from corerl.config.options import GLOO_INTERFACE
from corerl.config.schema import ClusterConfig, Config
from corerl.errors import ConfigError, CorerlError
from corerl.plan.check import require_no_code_of_a_model
from corerl.plan.resolve import selected
from corerl.plugin.registry import Kind, Loaded, load


def process_environment(cluster: ClusterConfig, *, device: str, transport: Loaded | None) -> dict[str, str]:
    """The environment that every process of a run gets before it imports anything. `transport` is that of its weight
    updates; None if it is not known."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if path := os.environ.get("PYTHONPATH"):  # that of a cluster's Ray may be another
        environment["PYTHONPATH"] = path
    if not cluster.address:
        environment[GLOO_INTERFACE] = "lo"  # one machine: no other interface need be up or trusted
    if device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"  # one core per process: more threads than cores only compete
    elif transport is not None and transport.spec.one_group and cluster.placement == "disaggregated":
        # Ranks and engines share an NCCL group, which needs equal settings everywhere; engines turn these off.
        environment |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    return environment


def environment_of(
    plugin: str, wanted: Mapping[str, str], *, cluster: ClusterConfig, common: Mapping[str, str]
) -> dict[str, str]:
    """The environment for one plugin's processes: what is `common` to all, which the user's values replace, and what
    the plugin wants. Raises ConfigError if it wants another value than they have."""
    user = {**cluster.environment, **{name: os.environ[name] for name in cluster.secrets}}  # may be secrets
    merged = {**common, **user}
    for name, value in wanted.items():
        known = merged.setdefault(name, value)
        if name == "LD_PRELOAD":  # a list, to which both may add
            merged[name] = ":".join(dict.fromkeys([*known.split(":"), *value.split(":")]))
        elif known != value:
            owner = "cluster.environment needs another value" if name in user else f"corerl needs {known!r}"
            raise ConfigError(
                f"environment variable {name}: {owner}, but {plugin} needs {value!r}; they cannot share a process, so "
                "choose one of them"
            )
    return merged


# ---- what processes import, known before a run's plan is made --------------------------------------------------------


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
