from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from corerl.errors import ModelError
from corerl_fsdp.boxes import dtensor_boxes


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """A process group in which this process is `rank`; local placement needs no other process."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "shape"),
    [
        ((4,), [Shard(0)], (8, 3)),
        ((4,), [Shard(0)], (5, 3)),  # 2, 2, 1, 0
        ((4,), [Shard(1)], (3, 10)),
        ((2, 2), [Replicate(), Shard(0)], (5, 2)),
        ((2, 2), [Shard(0), Shard(0)], (7, 2)),
        ((2, 2), [Shard(1), Shard(0)], (5, 7)),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (8, 2)),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(1)], (8, 6)),
    ],
)
def test_boxes_of_a_shard_are_where_torch_puts_values(
    mesh_shape: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...]
) -> None:
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    copies = torch.zeros(shape, dtype=torch.int64)
    for rank in range(4):
        with rank_of(rank, 4):
            mesh = init_device_mesh("cpu", mesh_shape)
            local = full
            for axis, placement in enumerate(placements):
                if not placement.is_replicate():
                    pieces, _ = placement._split_tensor(local, mesh.size(axis), with_padding=False)
                    local = pieces[mesh.get_coordinate()[axis]]
            tensor = DTensor.from_local(
                local.contiguous(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
            )
            boxes = dtensor_boxes(tensor)
            for offsets, sizes, view in boxes:
                part = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
                assert torch.equal(view, full[part])
                assert view.untyped_storage().data_ptr() == tensor.to_local().untyped_storage().data_ptr()
                copies[part] += 1
    replicas = 2 if any(placement.is_replicate() for placement in placements) else 1
    assert torch.equal(copies, torch.full(shape, replicas))


def test_a_plain_tensor_is_one_box_a_partial_none() -> None:
    ((offsets, sizes, view),) = dtensor_boxes(torch.nn.Parameter(torch.ones(2, 3)))
    assert (offsets, sizes, view.requires_grad) == ((0, 0), (2, 3), False)
    with rank_of(0, 2):
        partial = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
        with pytest.raises(ModelError, match="partial sum"):
            dtensor_boxes(partial)
