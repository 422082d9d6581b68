"""Build the environment variables of a run's processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from corerl.config.variables import GLOO_INTERFACE
from corerl.driver.prepare import Prepared
from corerl.plugin import hooktrace
from corerl.plugin.options import USER, merge_environments
from corerl.weights.transports import TRANSPORTS


def process_environment(prepared: Prepared) -> dict[str, str]:
    """The environment that every process of a run gets before it imports anything."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if path := os.environ.get("PYTHONPATH"):  # that of a cluster's Ray may be another
        environment["PYTHONPATH"] = path
    if hooktrace.wanted():
        environment[hooktrace.VARIABLE] = os.environ[hooktrace.VARIABLE]
    if not prepared.config.cluster.address:
        environment[GLOO_INTERFACE] = "lo"  # one machine: no other interface need be up or trusted
    if prepared.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"  # one core per process: more threads than cores only compete
    elif TRANSPORTS[prepared.plan.transport].joins and prepared.config.cluster.placement == "disaggregated":
        # Ranks and engines share an NCCL group, which needs equal settings everywhere; engines turn these off.
        environment |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    return environment


def environment_of(prepared: Prepared, plugin: str, wanted: Mapping[str, str]) -> dict[str, str]:
    """The environment for one plugin's processes; the user's values replace the run's own.

    Raises ConfigError if the plugin wants another value.
    """
    cluster = prepared.config.cluster
    user = {**cluster.environment, **{name: os.environ[name] for name in cluster.secrets}}
    own = {name: value for name, value in process_environment(prepared).items() if name not in user}
    return merge_environments(("corerl", own), (USER, user), (plugin, wanted))
