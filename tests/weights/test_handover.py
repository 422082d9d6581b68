"""State that travels from ranks to others, here threads over gloo: every element once, in buckets, or not at all."""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from corerl.errors import ContractError, ResizeFailed
from corerl.weights import handover as handover_module
from corerl.weights.chunks import Box, Chunk, flat_range_boxes, within
from corerl.weights.handover import PARTS, Handover, Room, Taken, give, mapped, part, transfers
from tests.machine import paced

SHAPES: dict[str, tuple[int, ...]] = {"embed": (13, 6), "norm": (6,), "q": (4, 3, 5), "scale": (), "head": (13, 6)}


def whole(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def flat(ranks: int) -> list[list[tuple[str, Box]]]:
    """Even ranges of all elements, whatever tensors they are of, as ZeRO has them."""
    total = sum(map(math.prod, SHAPES.values()))
    held: list[list[tuple[str, Box]]] = []
    for rank in range(ranks):
        start, stop, at, boxes = total * rank // ranks, total * (rank + 1) // ranks, 0, []
        for name, shape in SHAPES.items():
            size = math.prod(shape)
            inside = flat_range_boxes(shape, max(start - at, 0), min(stop - at, size))
            boxes += [(name, box) for box in inside]
            at += size
        held.append(boxes)
    return held


def columns(ranks: int) -> list[list[tuple[str, Box]]]:
    """Slices of the last dimension, as tensor parallelism has them; what cannot be split is on every rank."""
    held = []
    for rank in range(ranks):
        boxes: list[tuple[str, Box]] = []
        for name, shape in SHAPES.items():
            if len(shape) < 2:
                boxes.append((name, ((0,) * len(shape), shape)))
                continue
            first, last = shape[-1] * rank // ranks, shape[-1] * (rank + 1) // ranks
            boxes.append((name, ((0,) * (len(shape) - 1) + (first,), (*shape[:-1], last - first))))
        held.append(boxes)
    return held


def chunks(
    held: Sequence[Sequence[tuple[str, Box]]], values: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> list[list[Chunk]]:
    """Of each rank; a box that an earlier rank has too is a replica."""
    seen: set[tuple[str, Box]] = set()
    ranks = []
    for boxes in held:
        own = []
        for name, box in boxes:
            view = values[name][within(box, ((0,) * len(SHAPES[name]), SHAPES[name]))].to(dtype, copy=True)
            own.append(Chunk(name, SHAPES[name], box[0], box[1], view, (name, box) in seen))
            seen.add((name, box))
        ranks.append(own)
    return ranks


def handover_of(givers: int, takers: int) -> Handover:
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    port = listening.getsockname()[1]
    return Handover(
        host="127.0.0.1",
        port=port,
        token="secret",
        listening=listening.detach(),
        givers=givers,
        takers=takers,
        timeout=paced(60.0),
    )


def together(*calls: Callable[[], Any]) -> list[Future[Any]]:
    """Run all at once; returns when all have ended."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


def take_all(handover: Handover, master: Sequence[Chunk]) -> str:
    """As the only taker, of the only giver; returns its note."""
    taken = Taken(handover, 0)
    taken.take("master", master)
    note = taken.note(0)
    taken.close()
    return note


LAYOUTS = {
    "flat": flat,
    "columns": columns,
    "whole": lambda ranks: [[(name, ((0,) * len(shape), shape)) for name, shape in SHAPES.items()]] * ranks,
}


@pytest.mark.parametrize(
    ("before", "givers", "after", "takers"),
    [("flat", 3, "columns", 2), ("columns", 2, "flat", 4), ("whole", 2, "whole", 1), ("flat", 1, "whole", 3)],
)
@pytest.mark.parametrize("machines", [1, 2])
def test_every_rank_gets_its_boxes_of_every_kind_to_the_last_bit(
    before: str, givers: int, after: str, takers: int, machines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some takers cannot map what givers share, as on another machine; here every second time."""
    found, numbers = handover_module.mapped, itertools.count()
    monkeypatch.setattr(handover_module, "mapped", lambda place: None if next(numbers) % machines else found(place))
    handover = evolve(handover_of(givers, takers), part=64)  # bytes: so that there are many transfers
    kinds = {"master": whole(1), "exp_avg": whole(2), "snapshot/reference": whole(3)}
    nothing = {name: torch.full(shape, math.nan) for name, shape in SHAPES.items()}
    have = {kind: chunks(LAYOUTS[before](givers), values, torch.float32) for kind, values in kinds.items()}
    want = {kind: chunks(LAYOUTS[after](takers), nothing, torch.float32) for kind in kinds}

    def giving(rank: int) -> int:
        return give(handover, rank, {kind: ranks[rank] for kind, ranks in have.items()}, f"note of {rank}")

    def taking(rank: int) -> tuple[list[str], list[str]]:
        taken = Taken(handover, rank)
        for kind in taken.kinds:
            taken.take(kind, want[kind][rank])
        time.sleep(0.2 * rank)  # as ranks do that load what they have got, while givers have nothing left to send
        notes = [taken.note(giver) for giver in range(givers)]
        taken.close()
        return taken.kinds, notes

    ended = together(
        *[lambda rank=rank: giving(rank) for rank in range(givers)],
        *[lambda rank=rank: taking(rank) for rank in range(takers)],
    )
    for future in ended[givers:]:
        assert future.result() == (list(kinds), [f"note of {rank}" for rank in range(givers)])
    moved = 0
    for kind, values in kinds.items():
        for expected, own in zip(chunks(LAYOUTS[after](takers), values, torch.float32), want[kind], strict=True):
            for chunk, other in zip(own, expected, strict=True):
                assert torch.equal(chunk.view, other.view), (kind, chunk.name)
                moved += chunk.view.nbytes
    assert sum(future.result() for future in ended[:givers]) == moved  # replicas of the givers were not sent


def test_a_kind_travels_in_the_least_precision_that_loses_nothing() -> None:
    handover = handover_of(1, 1)
    half = chunks(flat(1), whole(1), torch.bfloat16)[0]
    want = chunks(flat(1), whole(2), torch.float32)[0]
    sent, _ = together(lambda: give(handover, 0, {"master": half}, ""), lambda: take_all(handover, want))
    assert sent.result() == 2 * sum(map(math.prod, SHAPES.values()))
    for chunk, other in zip(want, half, strict=True):
        assert torch.equal(chunk.view, other.view.float())


def test_what_a_rank_keeps_besides_tensors_may_be_of_any_length() -> None:
    """A store's connection breaks at values of over 8 MiB."""
    handover, note = handover_of(1, 1), np.random.default_rng(0).bytes(2**23).hex()
    _, heard = together(
        lambda: give(handover, 0, {"master": chunks(flat(1), whole(1), torch.float32)[0]}, note),
        lambda: take_all(handover, chunks(flat(1), whole(2), torch.float32)[0]),
    )
    assert heard.result() == note


def test_no_transfer_and_no_bucket_of_a_rank_is_larger_than_a_bucket() -> None:
    def rows(held: Sequence[Sequence[tuple[str, Box]]]) -> list[list[Any]]:
        return [[(name, SHAPES[name], box, "float32") for name, box in boxes] for boxes in held]

    for limit in (1, 7, 30, 1000):
        planned = list(transfers(rows(flat(3)), rows(columns(2)), limit))
        for _, _, pieces in planned:
            assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
            assert 0 < pieces[-1].stop <= limit
        # Each taker's transfers come in runs, one for each bucket: what all givers send it of one.
        for taker, group in itertools.groupby(planned, key=lambda each: each[1]):
            received = [each for each in group if each[1] == taker]
            givers = [giver for giver, _, _ in received]
            if len(set(givers)) == len(givers):  # of a single bucket
                assert sum(pieces[-1].stop for _, _, pieces in received) <= limit
        elements = sum(pieces[-1].stop for _, _, pieces in planned)
        assert elements == sum(math.prod(box[1]) for boxes in columns(2) for _, box in boxes)


def test_a_room_is_mapped_only_by_its_name_in_a_process_of_that_number() -> None:
    with contextlib.closing(Room()) as room, contextlib.closing(Room()) as other:
        for number in range(PARTS):
            room.part(number, torch.float32)[:2] = torch.tensor([1.5, float(number)])
        found = mapped(room.place)
        assert found is not None
        for number in range(2 * PARTS):  # the parts in turns
            assert part(found, number, torch.float32)[:2].tolist() == [1.5, float(number % PARTS)]
        assert mapped({**room.place, "name": other.place["name"]}) is None
        assert mapped({**room.place, "path": "/proc/0/fd/0"}) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda own: own[:-1], "'head' is of shape [13, 6] where it comes from, and absent where it goes"),
        (
            lambda own: [evolve(own[0], shape=(26, 6)), *own[1:]],
            "'embed' is of shape [13, 6] where it comes from, and of shape [26, 6] where it goes",
        ),
    ],
)
def test_other_tensors_are_refused_on_both_sides_before_any_is_sent(
    change: Callable[[list[Chunk]], list[Chunk]], says: str
) -> None:
    handover = handover_of(1, 1)
    want = chunks(flat(1), whole(2), torch.float32)[0]
    gave, took = together(
        lambda: give(handover, 0, {"master": chunks(flat(1), whole(1), torch.float32)[0]}, ""),
        lambda: Taken(handover, 0).take("master", change(want)),
    )
    with pytest.raises(ResizeFailed) as refused:
        gave.result()
    assert says in refused.value.message and refused.value.harmless
    with pytest.raises(ContractError) as also:
        took.result()
    assert says in also.value.message
    for chunk, other in zip(want, chunks(flat(1), whole(2), torch.float32)[0], strict=True):
        assert torch.equal(chunk.view, other.view)


def test_boxes_that_miss_elements_are_refused_with_their_tensor() -> None:
    handover = handover_of(1, 1)
    have = chunks(flat(2), whole(1), torch.float32)[0]  # of two ranks one: 111 elements, of which 27 are of "q"
    want = [each for each in chunks(flat(1), whole(2), torch.float32)[0] if each.name in {own.name for own in have}]
    gave, took = together(
        lambda: give(handover, 0, {"master": have}, ""),
        lambda: Taken(handover, 0).take("master", want),
    )
    with pytest.raises(ContractError, match=r"rank 0 wants 60 elements of 'q' at offsets \[0, 0, 0\], but is given 27"):
        took.result()
    assert isinstance(gave.exception(), ResizeFailed)


def test_a_giver_whose_takers_never_come_ends_when_it_is_called_off() -> None:
    handover = handover_of(1, 2)
    reason: list[str] = []
    threading.Timer(0.3, lambda: reason.append("no memory")).start()
    began = time.monotonic()
    with pytest.raises(ResizeFailed, match="called off: no memory"):
        give(handover, 0, {"master": []}, "", called_off=lambda: "".join(reason))
    assert time.monotonic() - began < handover.timeout / 2  # the deadline of a wait, not a timing
