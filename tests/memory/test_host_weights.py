from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import pytest
import torch

from corerl.errors import ModelError, WrongState
from corerl.memory.pool import HostMemory, Piece
from corerl.memory.storage import HostWeights
from corerl.weights.chunks import Chunk


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


@pytest.mark.parametrize("within", ["nothing", "an exception", "writes"])
def test_a_swap_shows_the_snapshot_and_leaves_both_as_they_were(within: str) -> None:
    storage, chunks = rank_of_two()
    weights = HostWeights()
    weights.save("reference", chunks)
    storage += 10
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError), weights.swapped("reference", chunks):
            assert storage.tolist() == [0, 1, 2, 3, 4, 5]
            if within == "writes":
                storage.fill_(-1.0)
            if within == "an exception":
                raise ZeroDivisionError
        assert storage.tolist() == [10, 11, 12, 13, 14, 15]


def test_a_snapshot_that_is_made_again_holds_the_current_weights() -> None:
    storage, chunks = rank_of_two()
    weights = HostWeights()
    weights.save("old", chunks)
    storage += 1
    weights.save("old", chunks)
    storage += 1
    with weights.swapped("old", chunks):
        assert storage.tolist() == [1, 2, 3, 4, 5, 6]


def test_loading_reads_this_ranks_boxes_alone_and_leaves_the_weights() -> None:
    storage, chunks = rank_of_two()
    weights, source = HostWeights(), Counting()
    assert weights.load("reference", chunks, source) == 6 * 4
    assert source.read_boxes == [("w", (2, 0), (2, 2)), ("b", (0,), (2,))]
    assert storage.tolist() == [0, 1, 2, 3, 4, 5]
    with weights.swapped("reference", chunks):
        assert storage.tolist() == [1.0] * 6


def test_a_source_that_does_not_fit_leaves_the_earlier_snapshot() -> None:
    storage, chunks = rank_of_two()
    weights = HostWeights()
    weights.save("reference", chunks)
    other = [Chunk("v", (2,), (0,), (2,), torch.zeros(2)), *chunks]
    with pytest.raises(ModelError, match="snapshot 'reference' has no tensor 'v'"):
        weights.load("reference", other, Counting())
    storage += 1
    with weights.swapped("reference", chunks):
        assert storage.tolist() == [0, 1, 2, 3, 4, 5]


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
