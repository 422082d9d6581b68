"""Run processes on machines; the only package that imports ray."""

import os
from typing import TYPE_CHECKING

# Ray reads these on import: do not drop a process's line because it resembles another's, and do not put color codes
# around Ray's own output.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_COLOR_PREFIX", "0")

if TYPE_CHECKING:
    from corerl.cluster.arrangement import Placement as Placement
    from corerl.cluster.group import RemoteObject as RemoteObject
    from corerl.cluster.nodes import ask_each_node as ask_each_node
    from corerl.cluster.nodes import living_nodes as living_nodes
    from corerl.cluster.nodes import own_address as own_address
    from corerl.cluster.placement import Bundle as Bundle
    from corerl.cluster.placement import ResourcePool as ResourcePool
    from corerl.cluster.placement import Slot as Slot
    from corerl.cluster.runtime import ray_session as ray_session
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
