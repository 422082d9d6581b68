"""Make the process groups of megatron-core from the config's sizes."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from attrs import frozen
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch.distributed import ProcessGroup

from corerl.memory import lone_rank_options
from corerl.types import ParallelLayout
from corerl_megatron.config import MegatronConfig

FP8_MULTIPLE = 128  # FP8 multiplies a multiple of this many tokens: the largest block of any recipe


@frozen(kw_only=True)
class Groups:
    """This rank's place, and the process groups that the plugin's own code uses."""

    tensor: ProcessGroup
    expert_tensor: ProcessGroup
    context: ProcessGroup
    pipeline: ProcessGroup
    data: ProcessGroup  # without context parallelism: ranks that read different samples
    tokens: ProcessGroup  # context and tensor: ranks that a micro-batch's tokens are split over before the experts
    made: list[ProcessGroup]  # all groups that megatron-core created
    expert_rank: int
    expert_ranks: int
    first_copy: bool  # no earlier rank holds the same part of the dense model
    first_expert_copy: bool  # no earlier rank holds the same experts

    @property
    def last_stage(self) -> bool:
        return self.pipeline.rank() == self.pipeline.size() - 1

    @property
    def outputs(self) -> bool:
        """Whether this rank returns outputs: one of the ranks that compute the same outputs does."""
        return self.last_stage and self.tensor.rank() == 0 and self.context.rank() == 0


def make_groups(options: MegatronConfig, *, timeout: float, device: torch.device) -> Groups:
    """Make the groups; called on every rank. A process has one set at a time, until `destroy_groups`."""
    parallel_state.destroy_model_parallel()
    minutes = math.ceil(timeout / 60)
    world = torch.distributed.group.WORLD
    by_ranks: dict[tuple[int, ...], Any] = {tuple(range(torch.distributed.get_world_size())): world}
    new_group = torch.distributed.new_group

    def shared(ranks: Sequence[int], **kwargs: Any) -> Any:
        key = tuple(ranks)
        if key not in by_ranks:
            if len(key) == 1 and device.type == "cuda":
                kwargs["pg_options"] = lone_rank_options(timedelta(minutes=minutes))
            by_ranks[key] = new_group(ranks, **kwargs)
        return by_ranks[key]

    # megatron-core makes some twenty groups, most with the same ranks as another. A group's communicator takes GPU
    # memory, even in sleep, so share them. All ranks ask for the same groups in the same order.
    with mock.patch.object(torch.distributed, "new_group", shared):
        # Keywords only: newer versions have more arguments in between.
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=options.tensor_parallel,
            pipeline_model_parallel_size=options.pipeline_parallel,
            virtual_pipeline_model_parallel_size=options.virtual_pipeline if options.virtual_pipeline > 1 else None,
            context_parallel_size=options.context_parallel,
            expert_model_parallel_size=options.expert_parallel,
            expert_tensor_parallel_size=options.expert_tensor_parallel or options.tensor_parallel,
            distributed_timeout_minutes=minutes,
            create_gloo_process_groups=False,
        )
    return Groups(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_group(),
        context=parallel_state.get_context_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        tokens=parallel_state.get_tensor_and_context_parallel_group(),
        made=[group for group in by_ranks.values() if isinstance(group, ProcessGroup) and group is not world],
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_ranks=parallel_state.get_expert_model_parallel_world_size(),
        first_copy=parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
        first_expert_copy=parallel_state.get_expert_data_parallel_rank() == 0,
    )


def destroy_groups(groups: Groups) -> None:
    """Destroy the groups: megatron-core only forgets them, and in torch each would keep its threads and memory."""
    parallel_state.destroy_model_parallel()
    for group in groups.made:
        with suppress(ValueError):  # already destroyed with its world group
            torch.distributed.destroy_process_group(group)
    groups.made.clear()
    forget_rotary_tables()  # each refers to the module that made it
    gc.collect()  # models refer to groups, in cycles; a group's threads end with its last reference


def forget_rotary_tables() -> None:
    """Free cached rotary tables. megatron-core keeps those of the last 32 maximum sequence lengths on the device: 4 MiB
    for 8k tokens with heads of size 128, 64 MiB for 128k."""
    for method in (*vars(RotaryEmbedding).values(), *vars(YarnRotaryEmbedding).values()):
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def layout(options: MegatronConfig, groups: Groups, *, rank: int, ranks: int) -> ParallelLayout:
    multiple = 2 * options.context_parallel if options.context_parallel > 1 else 1
    if options.sequence_parallel:
        multiple *= options.tensor_parallel
    if options.fp8 != "none":
        multiple = math.lcm(multiple, FP8_MULTIPLE * options.context_parallel)
    return ParallelLayout(
        rank=rank,
        world_size=ranks,
        dp_rank=groups.data.rank(),
        dp_size=groups.data.size(),
        outputs=groups.outputs,
        sequence_multiple=multiple,
        # Interleaved stages take micro-batches in rounds of pipeline_parallel.
        micro_batch_multiple=options.pipeline_parallel if options.virtual_pipeline > 1 else 1,
    )
