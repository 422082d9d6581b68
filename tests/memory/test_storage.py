from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from corerl.memory.measure import device_bytes
from corerl.memory.storage import StorageSleeper, resident_bytes
from corerl.types import MemoryKind


def bits(tensor: torch.Tensor) -> list[int]:
    values: list[int] = tensor.detach().contiguous().view(torch.int32).flatten().tolist()
    return values


def test_released_memory_is_gone_and_comes_back_bit_for_bit_under_every_alias() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 4))
    weight.data[0, 0] = float("nan")
    view, tied = weight.data[2:4], weight.data.t()
    expected, expected_view = bits(weight), bits(view)
    sleeper = StorageSleeper()

    assert sleeper.release(MemoryKind.PARAM, [weight, view, tied]) == 8 * 4 * 4  # one storage, counted once
    assert resident_bytes([weight, view, tied]) == 0
    assert weight.shape == (8, 4)

    assert sleeper.restore(MemoryKind.PARAM) == 8 * 4 * 4
    assert bits(weight) == expected and bits(view) == expected_view
    view.fill_(7.0)
    assert weight.data[2].tolist() == [7.0] * 4  # still the same storage


def test_gradients_come_back_as_zeros() -> None:
    grad = torch.randn(5)
    sleeper = StorageSleeper()
    assert sleeper.release(MemoryKind.GRAD, [grad]) == 20
    assert sleeper.restore(MemoryKind.GRAD) == 20
    assert grad.tolist() == [0.0] * 5


def test_releasing_and_restoring_twice_changes_nothing() -> None:
    moments = torch.arange(4.0)
    sleeper = StorageSleeper()
    assert sleeper.restore(MemoryKind.OPTIMIZER) == 0
    assert [sleeper.release(MemoryKind.OPTIMIZER, [moments]) for _ in range(2)] == [16, 0]
    assert [sleeper.restore(MemoryKind.OPTIMIZER) for _ in range(2)] == [16, 0]
    assert moments.tolist() == [0, 1, 2, 3]


def test_kinds_sleep_independently_and_a_shared_storage_belongs_to_the_first() -> None:
    weight, moments = torch.ones(3), torch.full((3,), 2.0)
    sleeper = StorageSleeper()
    assert sleeper.release(MemoryKind.PARAM, [weight]) == 12
    assert sleeper.release(MemoryKind.MASTER, [weight]) == 0
    assert sleeper.release(MemoryKind.OPTIMIZER, [moments]) == 12
    assert sleeper.restore(MemoryKind.PARAM) == 12
    assert weight.tolist() == [1.0] * 3 and resident_bytes([moments]) == 0
    sleeper.restore(MemoryKind.OPTIMIZER)
    assert moments.tolist() == [2.0] * 3


def test_step_counters_without_dims_stay() -> None:
    step, moments = torch.tensor(3.0), torch.ones(2)
    sleeper = StorageSleeper()
    assert sleeper.release(MemoryKind.OPTIMIZER, [step, moments]) == 8
    assert step.item() == 3.0


def test_what_is_resident_is_counted_by_storage() -> None:
    base = torch.zeros(10)
    assert resident_bytes([base, base[3:], base.view(2, 5), torch.tensor(1.0)]) == 44
    assert device_bytes(torch.device("cpu"), [base, base[3:]]) == 40


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    if dist.is_initialized():
        pytest.skip("a default process group exists already")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_dtensor_sleeps_by_its_local_storage(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    sharded = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    assert isinstance(sharded, DTensor)
    parameter = torch.nn.Parameter(sharded)
    sleeper = StorageSleeper()
    assert sleeper.release(MemoryKind.PARAM, [parameter]) == 24
    assert resident_bytes([parameter]) == 0
    sleeper.restore(MemoryKind.PARAM)
    assert sharded.to_local().tolist() == [0, 1, 2, 3, 4, 5]
