from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from corerl.errors import ModelError, WrongState
from corerl.memory import storage
from corerl.memory.pool import HostMemory, Piece
from corerl.memory.storage import SMALL, CopyStream, HostWeights, Part, StorageSleeper, resident_bytes
from corerl.types import MemoryKind
from corerl.weights.chunks import Chunk

CPU = torch.device("cpu")


def test_releasing_and_restoring_twice_changes_nothing() -> None:
    moments = torch.arange(4.0)
    sleeper = StorageSleeper(CPU)
    assert sleeper.restore(MemoryKind.OPTIMIZER) == 0
    assert [sleeper.release(MemoryKind.OPTIMIZER, [moments]) for _ in range(2)] == [16, 0]
    assert [sleeper.restore(MemoryKind.OPTIMIZER) for _ in range(2)] == [16, 0]
    assert moments.tolist() == [0, 1, 2, 3]


def mixed() -> list[torch.Tensor]:
    """Large storages and many small ones, of odd sizes and several dtypes."""
    generator = torch.Generator().manual_seed(0)
    large = [torch.randn(size, generator=generator) for size in (SMALL // 4, SMALL // 4 + 3, SMALL)]
    small = [torch.randint(256, (size,), generator=generator).to(torch.uint8) for size in range(1, 40)]
    return [small[0], *large[:2], *small[1:], large[2], torch.randn(9, 5, generator=generator).bfloat16()]


@pytest.mark.parametrize("order", list(itertools.permutations((MemoryKind.PARAM, MemoryKind.MASTER, MemoryKind.GRAD))))
def test_storages_come_back_bit_for_bit_in_any_order(
    order: Sequence[MemoryKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "PACK", 100)  # the small ones make several packs
    kinds = {kind: mixed() for kind in order}
    expected = [tensor.clone() for tensor in mixed()]
    sleeper = StorageSleeper(CPU, host := ScatteredMemory())
    for _ in range(3):
        for kind in order:
            assert sleeper.release(kind, kinds[kind]) == sum(each.nbytes for each in expected)
            assert resident_bytes(kinds[kind]) == 0
            if kind is not order[-1]:
                sleeper.restore(kind)  # a partial sleep: one alone
                sleeper.release(kind, kinds[kind])
        assert sleeper.asleep == set(order)
        for kind in order:
            sleeper.restore(kind)
            wanted = [torch.zeros_like(each) for each in expected] if kind is MemoryKind.GRAD else expected
            assert all(torch.equal(a, b) for a, b in zip(kinds[kind], wanted, strict=True))
        assert (sleeper.asleep, host.taken) == (set(), 0)


class ScatteredMemory(HostMemory):
    """In pieces of at most a thousand bytes, filled with what nobody may read."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, nbytes: int) -> list[Piece]:
        sizes = [1000] * (nbytes // 1000) + [nbytes % 1000 + 5]  # or a little more
        self.taken += len(sizes)
        return [Piece(0, 0, torch.full((size,), 255, dtype=torch.uint8)) for size in sizes]

    def give_back(self, pieces: Iterable[Piece]) -> None:
        self.taken -= len(list(pieces))


class FullMemory(HostMemory):
    def take(self, nbytes: int) -> list[Piece]:
        raise MemoryError("no memory")


def test_small_storages_cross_together_in_packs_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SMALL", 60)
    monkeypatch.setattr(storage, "PACK", 100)
    tensors = [torch.empty(size, dtype=torch.uint8) for size in (40, 60, 59, 1, 41, 50)]
    packs = storage._grouped(tensor.untyped_storage() for tensor in tensors)
    assert [[each.nbytes() for each in pack] for pack in packs] == [[60], [40, 59, 1], [41, 50]]


def test_nothing_is_freed_where_the_host_has_no_memory() -> None:
    weights = mixed()
    sleeper = StorageSleeper(CPU, FullMemory())
    with pytest.raises(MemoryError, match="no memory"):
        sleeper.release(MemoryKind.PARAM, weights)
    assert all(torch.equal(a, b) for a, b in zip(weights, mixed(), strict=True))
    assert sleeper.asleep == set() and sleeper.restore(MemoryKind.PARAM) == 0


@pytest.mark.parametrize("failing", range(4))
def test_nothing_is_freed_where_a_copy_fails(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = mixed()
    sleeper = StorageSleeper(CPU, host := ScatteredMemory())
    fails_at(monkeypatch, "to_host", failing)
    with pytest.raises(RuntimeError, match="the copy failed"):
        sleeper.release(MemoryKind.PARAM, weights)
    assert all(torch.equal(a, b) for a, b in zip(weights, mixed(), strict=True))
    assert (sleeper.asleep, host.taken) == (set(), 0)
    monkeypatch.undo()
    assert sleeper.release(MemoryKind.PARAM, weights) == sum(each.nbytes for each in mixed())


@pytest.mark.parametrize("failing", range(4))
def test_what_cannot_be_restored_sleeps_on_whole_and_comes_back_later(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = mixed()
    sleeper = StorageSleeper(CPU)
    sleeper.release(MemoryKind.PARAM, weights)
    fails_at(monkeypatch, "to_device", failing)
    with pytest.raises(RuntimeError, match="the copy failed"):
        sleeper.restore(MemoryKind.PARAM)
    assert (resident_bytes(weights), sleeper.asleep) == (0, {MemoryKind.PARAM})
    monkeypatch.undo()
    sleeper.restore(MemoryKind.PARAM)
    assert all(torch.equal(a, b) for a, b in zip(weights, mixed(), strict=True))


def fails_at(monkeypatch: pytest.MonkeyPatch, verb: str, number: int) -> None:
    """The copy of that number, from 0, fails."""
    copy, seen = getattr(CopyStream, verb), itertools.count()

    def failing(self: CopyStream, part: Part) -> None:
        if next(seen) == number:
            raise RuntimeError("the copy failed")
        copy(self, part)

    monkeypatch.setattr(CopyStream, verb, failing)


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
    sleeper = StorageSleeper(CPU)
    assert sleeper.release(MemoryKind.PARAM, [parameter]) == 24
    assert resident_bytes([parameter]) == 0
    sleeper.restore(MemoryKind.PARAM)
    assert sharded.to_local().tolist() == [0, 1, 2, 3, 4, 5]


def rank_of_two() -> tuple[torch.Tensor, list[Chunk]]:
    """The lower half of a [4, 2] tensor in flat storage, and a replica."""
    storage = torch.arange(6.0)
    chunks = [
        Chunk("w", (4, 2), (2, 0), (2, 2), storage[:4].view(2, 2)),
        Chunk("b", (2,), (0,), (2,), storage[4:], replica=True),
    ]
    return storage, chunks


class Counting:
    """A source of ones that remembers which boxes were read."""

    def __init__(self) -> None:
        self.read_boxes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def shape(self, name: str) -> tuple[int, ...] | None:
        return {"w": (4, 2), "b": (2,)}.get(name)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        self.read_boxes.append((name, tuple(offsets), tuple(sizes)))
        return torch.ones(tuple(sizes))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    _, chunks = rank_of_two()
    weights = HostWeights()
    with pytest.raises(WrongState, match="no snapshot 'ref'; known: none"):
        weights.drop("ref")
    weights.save("reference", chunks)
    weights.save("old", chunks)
    with pytest.raises(WrongState, match="no snapshot 'ref'; known: old, reference"), weights.swapped("ref", chunks):
        pass
    weights.drop("old")
    with pytest.raises(WrongState, match="known: reference"):
        weights.drop("old")


class Segments(HostMemory):
    """Memory in two segments of 1024 bytes, as a pool of pinned memory has it; notes what is out."""

    def __init__(self) -> None:
        self.out = 0

    def take(self, nbytes: int) -> list[Piece]:
        assert nbytes + self.out <= 2048
        self.out += nbytes
        ends = [min(nbytes, 1024), max(nbytes - 1024, 0)]
        return [Piece(index, 0, torch.empty(end, dtype=torch.uint8)) for index, end in enumerate(ends) if end]

    def give_back(self, pieces: Iterable[Piece]) -> None:
        self.out -= sum(piece.memory.numel() for piece in pieces)


def test_snapshots_use_given_memory_and_a_swap_returns_it() -> None:
    parameters = [torch.randn(120), torch.randn(10, 30), torch.randn(7).bfloat16(), torch.randn(0)]
    chunks = [Chunk(str(i), tuple(p.shape), (0,) * p.ndim, tuple(p.shape), p) for i, p in enumerate(parameters)]
    before = [parameter.clone() for parameter in parameters]
    host = Segments()  # the second parameter, of 1200 bytes, lies on both sides of the border
    weights = HostWeights(host)
    weights.save("old", chunks[:1])
    weights.drop("old")
    assert host.out == 0
    weights.save("old", chunks[:2])
    assert host.out == (kept := 512 + 1536)
    for parameter in parameters:
        parameter.zero_()
    host.out = 0  # a second such memory, for the swap
    with weights.swapped("old", chunks[:2]):
        assert host.out == kept
        for parameter, old in zip(parameters[:2], before, strict=False):
            torch.testing.assert_close(parameter, old, rtol=0, atol=0)
    assert host.out == 0
    assert not any(parameter.any() for parameter in parameters)
    with pytest.raises(ModelError):
        weights.load("other", chunks[2:], Counting())
    assert host.out == 0
    for _ in range(2):  # the second in the place of the first, whose memory it gives back
        weights.save("other", chunks[2:])
        assert host.out == 512
