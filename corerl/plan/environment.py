"""The environment of a run's processes: what all of them get, and what the user and a plugin want. Importing this
loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from corerl.config.options import GLOO_INTERFACE
from corerl.config.schema import ClusterConfig
from corerl.errors import ConfigError
from corerl.plugin.registry import Loaded


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
