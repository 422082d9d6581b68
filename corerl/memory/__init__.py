"""Release and restore device memory, and keep named weight snapshots in host memory."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.memory.device import empty_cache as empty_cache
    from corerl.memory.device import lone_rank_options as lone_rank_options
    from corerl.memory.storage import resident_bytes as resident_bytes
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
