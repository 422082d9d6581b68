"""Write megatron-core's own distributed checkpoint next to CoreRL's, for tools that read no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from corerl.errors import SaveFailed
from corerl.types import Step
from corerl.weights import all_gather_json
from corerl_megatron.adam import fused_adam
from corerl_megatron.build import Model

DIRECTORY = "megatron"  # in the directory of the role
VERSION = 3.0  # of Megatron's checkpoint format, in which query, key and value are interleaved by head
# The only layout of moments that can be loaded in any split; the default one cannot be loaded at all.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


class InThisProcess(TorchDistSaveShardedStrategy):
    """Writes in this process; megatron-core's own strategy forks a process that has threads and a GPU."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        checkpoint.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def write(model: Model, directory: Path, step: Step) -> None:
    """Write weights, masters and moments in the structure of Megatron's own training script. Called on every rank,
    inside `calling_megatron`; raises SaveFailed."""
    state = sharded_state(model, loading=False)
    state |= {"checkpoint_version": VERSION, "iteration": step.optimizer_step}
    with failing_together():
        try:
            if torch.distributed.get_rank() == 0:
                directory.mkdir(parents=True)
        except OSError as error:
            raise SaveFailed(f"cannot write {directory}: {error}") from error
    try:
        dist_checkpointing.save(state, str(directory), InThisProcess("torch_dist", 1), content_metadata=dict(METADATA))
    except (OSError, CheckpointException) as error:  # the second, for a full disk, is not an Exception
        raise SaveFailed(f"cannot write {directory}: {' '.join(str(error).split())}") from error


@contextmanager
def failing_together() -> Iterator[None]:
    """If the block raises SaveFailed on a rank, raise it on all: those who go on would wait for the others."""
    failure: SaveFailed | None = None
    try:
        yield
    except SaveFailed as error:
        failure = error
    reasons = all_gather_json("" if failure is None else failure.message)
    if failure is not None:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason:
            raise SaveFailed(f"rank {rank} failed: {reason}")


def sharded_state(model: Model, *, loading: bool) -> dict[str, Any]:
    """The state that `dist_checkpointing` saves, or loads into, on this rank."""
    several = len(model.chunks) > 1
    metadata = dict(METADATA)  # a copy: megatron-core adds a process group
    state: dict[str, Any] = {
        f"model{index if several else ''}": module.sharded_state_dict(metadata=metadata)
        for index, module in enumerate(model.modules)
    }
    distributed = any(isinstance(part, DistributedOptimizer) for part in model.optimizer.chained_optimizers)
    options = {"metadata": metadata} if distributed else {}
    with fused_adam():
        state["optimizer"] = model.optimizer.sharded_state_dict(dict(state), is_loading=loading, **options)
    return state
