"""Build the environment variables of a run's processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from corerl.config.schema import ClusterConfig
from corerl.config.variables import GLOO_INTERFACE
from corerl.errors import ConfigError
from corerl.plugin import hooktrace
from corerl.plugin.spec import Environment
from corerl.plugin.transports import transport_named

USER = "cluster.environment"  # whose values may be secrets
JOINED = {"LD_PRELOAD": ":"}  # variables that hold a list, and its separator: several plugins may add to it


def process_environment(*, cluster: ClusterConfig, device: str, transport: str) -> dict[str, str]:
    """The environment that every process of a run gets before it imports anything. `transport` is that of its weight
    updates; empty if it is not known."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if path := os.environ.get("PYTHONPATH"):  # that of a cluster's Ray may be another
        environment["PYTHONPATH"] = path
    if hooktrace.wanted():
        environment[hooktrace.VARIABLE] = os.environ[hooktrace.VARIABLE]
    if not cluster.address:
        environment[GLOO_INTERFACE] = "lo"  # one machine: no other interface need be up or trusted
    if device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"  # one core per process: more threads than cores only compete
    elif transport and transport_named(transport).joins and cluster.placement == "disaggregated":
        # Ranks and engines share an NCCL group, which needs equal settings everywhere; engines turn these off.
        environment |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    return environment


def environment_of(
    plugin: str, wanted: Mapping[str, str], *, cluster: ClusterConfig, common: Mapping[str, str]
) -> dict[str, str]:
    """The environment for one plugin's processes; the user's values replace those `common` to all processes.

    Raises ConfigError if the plugin wants another value.
    """
    user = {**cluster.environment, **{name: os.environ[name] for name in cluster.secrets}}
    own = {name: value for name, value in common.items() if name not in user}
    return merge_environments(("corerl", own), (USER, user), (plugin, wanted))


def merge_environments(*environments: tuple[str, Environment]) -> dict[str, str]:
    """Merge (plugin, environment) pairs into one environment. LD_PRELOAD is joined, in the order given.

    Raises ConfigError if two plugins want different values of one variable.
    """
    merged: dict[str, str] = {}
    owners: dict[str, str] = {}
    for owner, environment in environments:
        for variable, value in environment.items():
            if variable not in merged:
                merged[variable], owners[variable] = value, owner
            elif variable in JOINED:
                separator = JOINED[variable]
                parts = [*merged[variable].split(separator), *value.split(separator)]
                merged[variable] = separator.join(dict.fromkeys(parts))
            elif merged[variable] != value:
                own, other = (
                    "another value" if each == USER else repr(text)
                    for each, text in ((owners[variable], merged[variable]), (owner, value))
                )
                raise ConfigError(
                    f"environment variable {variable}: {owners[variable]} needs {own}, but {owner} needs {other}; "
                    "they cannot share a process, so choose one of them"
                )
    return merged
