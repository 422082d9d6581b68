"""The portable training checkpoint: sharded, published atomically, readable by every backend."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.checkpoint.commit import begin as begin
    from corerl.checkpoint.reader import CheckpointSource as CheckpointSource
    from corerl.checkpoint.writer import stage as stage
    from corerl.checkpoint.writer import write as write
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
