"""Give the memory behind tensors back to the device and restore it bit for bit, while every view of it stays valid."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set

import torch
from attrs import field, frozen
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from corerl.memory.pool import ALIGNMENT, HostMemory, Piece, cut, host_memory
from corerl.types import MemoryKind

# A copy takes some microseconds to start, in which half a MiB crosses: what is smaller crosses together.
SMALL = 2**19  # bytes
PACK = 2**24  # bytes that cross together; as many are taken on the device meanwhile


@frozen(eq=False)
class Part:
    """A large storage, or small ones in a row, and what they hold."""

    storages: Sequence[torch.UntypedStorage]
    sizes: Sequence[int]  # bytes of each
    host: Sequence[torch.Tensor] = ()  # [n] uint8 each, one after the other; none where zeros come back


@frozen(eq=False)
class Sleeping:
    """Storages of size 0."""

    parts: Sequence[Part]
    pieces: Sequence[Piece] = field(factory=list)  # the host memory in which the parts lie

    @property
    def nbytes(self) -> int:
        return sum(sum(part.sizes) for part in self.parts)


class StorageSleeper:
    """Resizes storages in place (`untyped_storage().resize_`), so parameters, optimizer state and aliases keep their
    identity. Each storage counts once, and for the kind that was released first.

    On a GPU copies run on a stream of their own, to and from pinned memory, after all that the device has been given so
    far; both verbs return when they are done.
    """

    def __init__(self, device: torch.device, host: HostMemory | None = None) -> None:
        self._host = host or host_memory(device)
        self._copies = Copies(device)
        self._asleep: dict[MemoryKind, Sleeping] = {}

    @property
    def host(self) -> HostMemory:
        """Where what sleeps is copied to. What is awake leaves room in it."""
        return self._host

    @property
    def asleep(self) -> Set[MemoryKind]:
        return self._asleep.keys()

    @property
    def refusal(self) -> str:
        """Why host memory is not pinned where it should be, as far as is known; else ""."""
        return self._host.refusal

    def reserve(self, nbytes: int, group: ProcessGroup | None = None) -> None:
        """Begin to make host memory for `nbytes` that will sleep at the same time, on all ranks of `group`.
        Raises MemoryError where the host has too little for its ranks together."""
        self._host.reserve(nbytes + nbytes // 512 + PACK, group)  # alignment takes at most a thousandth

    def release(self, kind: MemoryKind, tensors: Iterable[torch.Tensor]) -> int:
        """Free `kind`; returns the bytes, 0 where it sleeps. Gradients are dropped, the rest copied to the host first.

        Tensors of 0 dims (step counters) stay. Nothing is freed where a copy fails. The freed memory goes to the
        device's caching allocator.
        """
        if kind in self._asleep:
            return 0
        groups = list(_grouped(_storages(tensors)))
        sleeping = _dropped(groups) if kind is MemoryKind.GRAD else self._copied(groups)
        # All copies are done before the first storage goes: a failure for want of host memory changes nothing.
        _empty(sleeping.parts)
        self._asleep[kind] = sleeping
        return sleeping.nbytes

    def restore(self, kind: MemoryKind) -> int:
        """Restore `kind`, gradients as zeros; returns the bytes, as many as were freed, 0 where it is awake.

        Where it fails, for want of device memory, all of `kind` sleeps on and can be restored later."""
        sleeping = self._asleep.get(kind)
        if sleeping is None:
            return 0
        try:
            with self._copies:
                for part in sleeping.parts:
                    for storage, size in zip(part.storages, part.sizes, strict=True):
                        storage.resize_(size)
                    self._copies.to_device(part)  # goes on while memory is taken for the next
        except BaseException:
            _empty(sleeping.parts)
            raise
        self._host.give_back(sleeping.pieces)
        del self._asleep[kind]
        return sleeping.nbytes

    def close(self) -> None:
        """Give the host memory back. What sleeps is lost."""
        self._host.close()
        self._asleep.clear()

    def _copied(self, groups: Sequence[Sequence[torch.UntypedStorage]]) -> Sleeping:
        sizes = [[storage.nbytes() for storage in group] for group in groups]
        rooms = [sum(each) if sum(each) < SMALL else -(-sum(each) // ALIGNMENT) * ALIGNMENT for each in sizes]
        pieces = self._host.take(sum(rooms))
        try:
            parts = [Part(*each) for each in zip(groups, sizes, cut(pieces, rooms), strict=True)]
            with self._copies:
                for part in parts:
                    self._copies.to_host(part)
        except BaseException:
            self._host.give_back(pieces)
            raise
        return Sleeping(parts, pieces)


class Copies:
    """`with copies: copies.to_host(part)`: started one after the other, and done when the block has ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        if self._device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(self._device)
            # On any stream there may be kernels that write what is copied, or use the memory that is written to.
            torch.cuda.synchronize(self._device)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def to_host(self, part: Part) -> None:
        with self._aside():
            views = [_bytes_of(storage) for storage in part.storages]
            for host, device in _facing(part, views[0] if len(views) == 1 else torch.cat(views)):
                host.copy_(device, non_blocking=True)

    def to_device(self, part: Part) -> None:
        """The storages have their size again."""
        with self._aside():
            views = [_bytes_of(storage) for storage in part.storages]
            if not part.host:
                for view in views:
                    view.zero_()
                return
            packed = len(views) > 1
            whole = torch.empty(sum(part.sizes), dtype=torch.uint8, device=views[0].device) if packed else views[0]
            for host, device in _facing(part, whole):
                device.copy_(host, non_blocking=True)
            if packed:
                torch._foreach_copy_(views, whole.split(list(part.sizes)))

    def _aside(self) -> contextlib.AbstractContextManager[object]:
        """A block on the copies' stream; not for `resize_`: memory belongs to the stream current when it was taken."""
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()


def resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages that the tensors lie in now."""
    return sum(storage.nbytes() for storage in _storages(tensors, scalars=True))


def _storages(tensors: Iterable[torch.Tensor], *, scalars: bool = False) -> Iterator[torch.UntypedStorage]:
    """The distinct, non-empty storages, of a DTensor that of its local part."""
    seen: set[int] = set()
    for tensor in tensors:
        local = tensor
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                local = tensor.to_local()
        if local.ndim == 0 and not scalars:
            continue
        storage = local.untyped_storage()
        if storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _grouped(storages: Iterable[torch.UntypedStorage]) -> Iterator[list[torch.UntypedStorage]]:
    """Groups: large storages first, each by itself; then small ones of one device, up to PACK bytes together."""
    small = defaultdict(list)
    for storage in storages:
        if storage.nbytes() >= SMALL:
            yield [storage]
        else:
            small[storage.device].append(storage)
    for each in small.values():
        pack: list[torch.UntypedStorage] = []
        nbytes = 0
        for storage in each:
            if nbytes + storage.nbytes() > PACK:
                yield pack
                pack, nbytes = [], 0
            pack.append(storage)
            nbytes += storage.nbytes()
        yield pack


def _dropped(groups: Iterable[Sequence[torch.UntypedStorage]]) -> Sleeping:
    """What comes back as zeros."""
    return Sleeping([Part(group, [storage.nbytes() for storage in group]) for group in groups])


def _empty(parts: Iterable[Part]) -> None:
    for part in parts:
        for storage in part.storages:
            storage.resize_(0)


def _facing(part: Part, whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Host and device memory of the same bytes; the host's may be longer at the end."""
    for host in part.host:
        device, whole = whole[: host.numel()], whole[host.numel() :]
        yield host[: device.numel()], device


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """[nbytes] uint8, the storage itself."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
