"""Hand training state from the ranks of one group to those of another, whatever their numbers, layouts and backends.

Ranks that have the state give it, ranks that want it take it. Each taker says which boxes of which tensors it holds;
each giver passes on of them what it has, in small pieces, for which no end needs memory worth mention: through host
memory that both have mapped, or over gloo from machine to machine. They meet in a store that the first giver hosts:

    note/g        giver g -> takers    what each keeps besides tensors
    given         giver 0 -> all       the kinds of state to come, in order
    has/KIND/g    giver g -> all       its boxes
    wants/KIND/t  taker t -> all       its boxes
    room/KIND/g   giver g -> takers    where it puts them
    maps/KIND/g/t taker t -> giver g   whether it could map that
    done/t        taker t -> giver 0   it needs the store no more

Transfers are in the same order on all ranks, bucket by bucket, taker by taker and for each of them giver by giver: the
earliest that has not been made can always be made, so no two ranks wait for each other.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import secrets
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from corerl.errors import ContractError, ResizeFailed
from corerl.messages import first_line
from corerl.weights.chunks import Box, Chunk, intersect, within
from corerl.weights.shared import SharedOnHost, opened, pinned

POLL_SECONDS = 0.05  # between two looks whether a handover was called off
# Bytes of a transfer at most. Between CPUs what is written is read while it is still in the processor's cache; between
# GPUs each transfer costs two messages, as long as copying some megabytes.
PART, PART_OF_GPUS = 2**22, 2**25
PARTS = 2  # of a giver's room
VALUE = 2**22  # bytes of one value in the store

Shape: TypeAlias = tuple[int, ...]
Row: TypeAlias = tuple[str, Shape, Box, str]  # (name, whole shape, box, dtype) of a box that a rank holds


@frozen(kw_only=True)
class Handover:
    """Where the ranks of two groups meet; all of them get the same."""

    host: str  # of the store
    port: int
    token: str  # that its keys begin with
    listening: int | None = None  # file descriptor, in the first giver's process, of a socket already listening there
    givers: int
    takers: int
    timeout: float = 600.0  # seconds that one rank waits for another
    part: int = PART  # bytes of a transfer at most

    def open_store(self, *, master: bool) -> dist.Store:
        store = dist.TCPStore(
            self.host,
            self.port,
            is_master=master,
            wait_for_workers=False,
            timeout=timedelta(seconds=self.timeout),
            master_listen_fd=self.listening if master else None,
        )
        return dist.PrefixStore(self.token, store)

    def join(self, store: dist.Store, rank: int) -> Any:
        """The group of all ranks, takers after givers; returns once all have come."""
        size, timeout = self.givers + self.takers, timedelta(seconds=self.timeout)
        return dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, size, timeout)


@frozen(eq=False)
class Piece:
    """One box that travels: where it is in the giver's chunk, in the taker's, and in the transfer."""

    given: int  # position among the giver's chunks
    source: tuple[slice, ...]
    taken: int  # position among the taker's chunks
    target: tuple[slice, ...]
    sizes: Shape
    start: int  # elements of the transfer before it

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.sizes)


def transfers(
    has: Sequence[Sequence[Row]], wants: Sequence[Sequence[Row]], bucket_elements: int
) -> Iterator[tuple[int, int, list[Piece]]]:
    """(giver, taker, pieces) of all transfers that are not empty, in the order in which they are made. `has` and
    `wants` are the boxes of each giver and each taker, which cover every tensor; no transfer of a bucket, nor what one
    rank gets of all of them, has more than `bucket_elements`."""
    given = [_by_name(rows) for rows in has]
    taken = [_by_name(rows) for rows in wants]
    shapes = {name: shape for rows in has for name, shape, _, _ in rows}
    for bucket in _buckets(shapes, bucket_elements):
        for taker, own in enumerate(taken):
            for giver, theirs in enumerate(given):
                pieces: list[Piece] = []
                start = 0
                for name, part in bucket:
                    for at, box in theirs.get(name, ()):
                        for into, other in own.get(name, ()):
                            common = intersect(box, other)
                            common = intersect(common, part) if common is not None else None
                            if common is None:
                                continue
                            pieces.append(Piece(at, within(common, box), into, within(common, other), common[1], start))
                            start = pieces[-1].stop
                if pieces:
                    yield giver, taker, pieces


def _by_name(rows: Sequence[Row]) -> dict[str, list[tuple[int, Box]]]:
    found: dict[str, list[tuple[int, Box]]] = {}
    for position, (name, _, box, _) in enumerate(rows):
        found.setdefault(name, []).append((position, box))
    return found


def _buckets(shapes: Mapping[str, Shape], elements: int) -> Iterator[list[tuple[str, Box]]]:
    """All tensors, in slices of their first dimension where they are larger than a bucket."""
    bucket: list[tuple[str, Box]] = []
    left = elements
    for name, shape in shapes.items():
        for part in _slices(shape, elements):
            size = math.prod(part[1])
            if size > left and bucket:
                yield bucket
                bucket, left = [], elements
            bucket.append((name, part))
            left -= size
    if bucket:
        yield bucket


def _slices(shape: Shape, elements: int) -> Iterator[Box]:
    if math.prod(shape) <= elements or not shape:
        yield (0,) * len(shape), shape
        return
    inner = math.prod(shape[1:])
    if inner > elements:  # even a row is too large
        for row in range(shape[0]):
            for offsets, sizes in _slices(shape[1:], elements):
                yield (row, *offsets), (1, *sizes)
        return
    rows = elements // inner
    for first in range(0, shape[0], rows):
        yield (first, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:])


def give(
    handover: Handover,
    rank: int,
    state: Mapping[str, Sequence[Chunk]],
    note: str,
    *,
    called_off: Callable[[], str] = lambda: "",
) -> int:
    """Send this giver's part of each kind of state, but for replicas; returns the bytes sent. `note` is what the takers
    get besides. Raises ResizeFailed if a taker is lost, or once `called_off`, which is polled, returns a reason."""
    sent, failed = [0], list[Exception]()
    joined: list[Any] = []

    def send() -> None:
        try:
            sent[0] = _send(handover, rank, state, note, joined)
        except Exception as error:  # raised below, in the waiting thread
            failed.append(error)

    # In a thread: the libraries return only after their own timeout if takers never come.
    sending = threading.Thread(target=send, name="handover", daemon=True)
    sending.start()
    while sending.is_alive():
        if reason := called_off():
            for group in joined:
                group.abort()
            raise ResizeFailed(f"the handover was called off: {reason}")
        sending.join(POLL_SECONDS)
    if failed:
        raise ResizeFailed(f"the state was not handed over: {first_line(failed[0])}") from failed[0]
    return sent[0]


def _send(handover: Handover, rank: int, state: Mapping[str, Sequence[Chunk]], note: str, joined: list[Any]) -> int:
    store = handover.open_store(master=rank == 0)
    _put(store, f"note/{rank}", note)
    if rank == 0:
        _put(store, "given", json.dumps(list(state)))
    owned = {kind: [chunk for chunk in chunks if not chunk.replica] for kind, chunks in state.items()}
    for kind, chunks in owned.items():
        _tell(store, f"has/{kind}/{rank}", chunks)
    _hear(store, f"wants/{next(iter(state))}", handover.takers)  # before the group: it waits less patiently
    group = handover.join(store, rank)
    joined.append(group)
    sent, signal = 0, torch.zeros(1, dtype=torch.uint8)
    with contextlib.ExitStack() as stack:
        room = stack.enter_context(contextlib.closing(Room(handover.part)))
        stack.enter_context(pinned(room.bytes, (chunk.view for chunks in owned.values() for chunk in chunks)))
        for kind, chunks in owned.items():
            plan = _plan(store, handover, kind)
            mine = [(taker, pieces) for giver, taker, pieces in plan.transfers if giver == rank]
            store.set(f"room/{kind}/{rank}", json.dumps(room.place))
            maps = {taker: store.get(f"maps/{kind}/{rank}/{taker}") == b"yes" for taker in {taker for taker, _ in mine}}
            reading: deque[tuple[int, int]] = deque()  # (number, taker) of parts of the room that were not read yet
            for number, (taker, pieces) in enumerate(mine):
                while reading and reading[0][0] <= number - PARTS:
                    group.recv([signal], handover.givers + reading.popleft()[1], 0).wait()
                flat = room.part(number, plan.dtype)[: pieces[-1].stop]
                for piece in pieces:
                    flat[piece.start : piece.stop].view(piece.sizes).copy_(chunks[piece.given].view[piece.source])
                if maps[taker]:
                    group.send([signal], handover.givers + taker, 0).wait()
                    reading.append((number, taker))
                else:
                    group.send([flat], handover.givers + taker, 0).wait()
                sent += flat.nbytes
            for _, taker in reading:
                group.recv([signal], handover.givers + taker, 0).wait()
    if rank == 0:  # whose store it is
        for taker in range(handover.takers):
            store.get(f"done/{taker}")
    return sent


@define(eq=False)
class Taken:
    """The state that other ranks hand over, in the place of a checkpoint's. Its kinds are to be taken in their order.

    Raises ContractError, on all takers alike, if givers do not have what is wanted, or torch's if one is lost."""

    handover: Handover
    rank: int  # among the takers
    kinds: list[str] = field(init=False)
    _store: dist.Store = field(init=False)
    _group: Any = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._store = self.handover.open_store(master=False)
        self.kinds = json.loads(_get(self._store, "given"))

    def note(self, giver: int) -> str:
        """What a giver keeps besides tensors."""
        return _get(self._store, f"note/{giver}")

    def close(self) -> None:
        """To be called once nothing else is needed: until then the first giver waits."""
        self._store.set(f"done/{self.rank}", "")

    def take(self, kind: str, chunks: Sequence[Chunk]) -> None:
        """Fill the chunks, replicas included, with the state of this kind."""
        handover = self.handover
        _tell(self._store, f"wants/{kind}/{self.rank}", chunks)
        if self._group is None:
            self._group = handover.join(self._store, handover.givers + self.rank)
        plan = _plan(self._store, handover, kind)
        mine = [(number, giver, pieces) for number, giver, taker, pieces in plan.numbered if taker == self.rank]
        mapped = {giver: self._mapped(kind, giver) for giver in {giver for _, giver, _ in mine}}
        signal, read = torch.zeros(1, dtype=torch.uint8), []
        with contextlib.ExitStack() as stack:
            for room in mapped.values():
                if room is not None:
                    stack.enter_context(pinned(room, (chunk.view for chunk in chunks)))
            for number, giver, pieces in mine:
                shared = mapped[giver]
                flat = (
                    torch.empty(pieces[-1].stop, dtype=plan.dtype)
                    if shared is None
                    else part(shared, number, plan.dtype)
                )
                self._group.recv([flat if shared is None else signal], giver, 0).wait()
                for piece in pieces:
                    chunks[piece.taken].view[piece.target].copy_(flat[piece.start : piece.stop].view(piece.sizes))
                if shared is not None:  # not waited for here: the giver listens once it wants the part again
                    read.append(self._group.send([signal], giver, 0))
            for work in read:
                work.wait()

    def _mapped(self, kind: str, giver: int) -> torch.Tensor | None:
        """The bytes of a giver's room; None if it is on another machine, or out of reach in another container."""
        found = mapped(json.loads(self._store.get(f"room/{kind}/{giver}")))
        self._store.set(f"maps/{kind}/{giver}/{self.rank}", "no" if found is None else "yes")
        return found


class Room:
    """Host memory in which a giver puts what others on its machine read, in parts: one is filled while another is
    read."""

    def __init__(self, part: int = PART) -> None:
        self._name = f"corerl-{secrets.token_hex(8)}"  # by which a taker knows that it has found this one
        self._shared = SharedOnHost(PARTS * part, self._name)

    @property
    def bytes(self) -> torch.Tensor:
        return self._shared.bytes

    @property
    def place(self) -> dict[str, Any]:
        handle, (descriptor,) = self._shared.handle()
        return {"name": self._name, "path": f"/proc/{os.getpid()}/fd/{descriptor}", "handle": handle}

    def part(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """The part for the transfer of this number, among the giver's of one kind."""
        return part(self.bytes, number, dtype)

    def close(self) -> None:
        self._shared.close()


def part(room: torch.Tensor, number: int, dtype: torch.dtype) -> torch.Tensor:
    return room.view(PARTS, -1)[number % PARTS].view(dtype)


def mapped(place: Mapping[str, Any]) -> torch.Tensor | None:
    """The bytes of the room at this place; None if they are out of reach."""
    try:
        if place["name"] not in os.readlink(place["path"]):
            return None  # the process of this number is another one here
        descriptor = os.open(place["path"], os.O_RDWR)
    except OSError:
        return None
    return opened(place["handle"], [descriptor])


@frozen(eq=False)
class _Plan:
    """How one kind of state travels."""

    transfers: list[tuple[int, int, list[Piece]]]
    dtype: torch.dtype  # the least that loses nothing of any giver's

    @property
    def numbered(self) -> Iterator[tuple[int, int, int, list[Piece]]]:
        """(number among its giver's, giver, taker, pieces)."""
        counts: Counter[int] = Counter()
        for giver, taker, pieces in self.transfers:
            yield counts[giver], giver, taker, pieces
            counts[giver] += 1


def _plan(store: dist.Store, handover: Handover, kind: str) -> _Plan:
    has = _hear(store, f"has/{kind}", handover.givers)
    wants = _hear(store, f"wants/{kind}", handover.takers)
    _require_covered(kind, has, wants)
    dtype = torch.bool  # the least of all
    for name in {dtype for rows in has for _, _, _, dtype in rows}:
        dtype = torch.promote_types(dtype, getattr(torch, name))
    return _Plan(list(transfers(has, wants, handover.part // dtype.itemsize)), dtype)


def _require_covered(kind: str, has: Sequence[Sequence[Row]], wants: Sequence[Sequence[Row]]) -> None:
    """Raise ContractError unless givers and takers speak of the same tensors, and takers get every element once."""
    given = {name: shape for rows in has for name, shape, _, _ in rows}
    wanted = {name: shape for rows in wants for name, shape, _, _ in rows}
    for name, shape in {**given, **wanted}.items():
        if given.get(name) != wanted.get(name):
            sides = [f"of shape {list(shapes[name])}" if name in shapes else "absent" for shapes in (given, wanted)]
            raise ContractError(
                f"handing over {kind!r}: {name!r} is {sides[0]} where it comes from, and {sides[1]} where it goes, "
                f"{list(shape)}; both backends must expose the same Hugging Face tensors"
            )
    boxes = _by_name([row for rows in has for row in rows])
    for taker, rows in enumerate(wants):
        for name, _, box, _ in rows:
            got = sum(math.prod(common[1]) for _, each in boxes[name] if (common := intersect(each, box)) is not None)
            if got != math.prod(box[1]):
                raise ContractError(
                    f"handing over {kind!r}: rank {taker} wants {math.prod(box[1])} elements of {name!r} at offsets "
                    f"{list(box[0])}, but is given {got}; boxes that are no replicas must hold each element once"
                )


def _tell(store: dist.Store, key: str, chunks: Sequence[Chunk]) -> None:
    rows = [
        (chunk.name, tuple(chunk.shape), chunk.box, str(chunk.view.dtype).removeprefix("torch.")) for chunk in chunks
    ]
    _put(store, key, json.dumps(rows))


def _put(store: dist.Store, key: str, text: str) -> None:
    """Store a text of any length: a value of over 8 MiB would break the connection."""
    data = base64.b64encode(zlib.compress(text.encode(), level=1)).decode()
    for number, start in enumerate(range(0, len(data), VALUE)):
        store.set(f"{key}/part/{number}", data[start : start + VALUE])
    store.set(key, str(-(-len(data) // VALUE)))


def _get(store: dist.Store, key: str) -> str:
    parts = [store.get(f"{key}/part/{number}") for number in range(int(store.get(key)))]
    return zlib.decompress(base64.b64decode(b"".join(parts))).decode()


def _hear(store: dist.Store, prefix: str, ranks: int) -> list[list[Row]]:
    return [
        [
            (name, tuple(shape), (tuple(offsets), tuple(sizes)), dtype)
            for name, shape, (offsets, sizes), dtype in json.loads(_get(store, f"{prefix}/{rank}"))
        ]
        for rank in range(ranks)
    ]
