"""The environment variables of a run's processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from corerl.driver.prepare import Prepared
from corerl.plugin import hooktrace
from corerl.plugin.options import merge_environments
from corerl.weights.transports import TRANSPORTS


def process_environment(prepared: Prepared) -> dict[str, str]:
    """What every process of a run is given before it imports anything."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # A loss or a backend of the user's own, 'module:name', is found where the driver finds it.
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
    }
    if hooktrace.wanted():
        environment[hooktrace.VARIABLE] = os.environ[hooktrace.VARIABLE]
    if prepared.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"  # one core a process: more threads than cores fight each other
        if not prepared.config.cluster.address:
            environment["GLOO_SOCKET_IFNAME"] = "lo"  # one machine: no other interface need be up, or trusted
    elif TRANSPORTS[prepared.plan.transport].joins and prepared.config.cluster.placement == "disaggregated":
        # Ranks and engines are in one group of NCCL's, which must be set alike in all; engines switch these off.
        environment |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    return environment


def environment_of(prepared: Prepared, plugin: str, wanted: Mapping[str, str]) -> dict[str, str]:
    """The same for those of one plugin: what the user gives stands in the place of what a run gives by itself.

    Raises ConfigError where the plugin wants another value.
    """
    user = prepared.config.cluster.environment
    own = {name: value for name, value in process_environment(prepared).items() if name not in user}
    return merge_environments(("corerl", own), ("cluster.environment", user), (plugin, wanted))
