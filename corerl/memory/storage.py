"""Release the device memory behind tensors and restore it bit for bit, while every view of it stays valid; and keep
named copies of a rank's weights in host memory: a reference policy is one, not a second model on the device."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set

import torch
from attrs import evolve, field, frozen
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from corerl.errors import WrongState
from corerl.memory.pool import ALIGNMENT, HostMemory, Piece, cut, host_memory
from corerl.types import MemoryKind
from corerl.weights.chunks import Chunk, TensorSource, fill

# Starting a copy takes as long as copying about half a MiB, so smaller storages are copied together.
SMALL = 2**19  # bytes
PACK = 2**24  # bytes that are copied together, through a device buffer of that size


@frozen(eq=False)
class Part:
    """One large storage or a group of small ones, and the host copy of their contents."""

    storages: Sequence[torch.UntypedStorage]
    sizes: Sequence[int]  # bytes of each
    host: Sequence[torch.Tensor] = ()  # [n] uint8 each, end to end; empty if the storages come back as zeros


@frozen(eq=False)
class Sleeping:
    """Released storages (of size 0), with their host copies."""

    parts: Sequence[Part]
    pieces: Sequence[Piece] = field(factory=list)  # the parts' host memory

    @property
    def nbytes(self) -> int:
        return sum(sum(part.sizes) for part in self.parts)


class StorageSleeper:
    """Releases and restores storages in place (`untyped_storage().resize_`), so parameters, optimizer state and aliases
    keep their identity. Each storage counts once, for the kind that was released first.

    On a GPU, copies run on a separate stream, to and from pinned memory, after all work queued so far; `release` and
    `restore` return when they are done.
    """

    def __init__(self, device: torch.device, host: HostMemory | None = None) -> None:
        self.host = host or host_memory(device)  # awake storages leave room in it
        self._copies = CopyStream(device)
        self._asleep: dict[MemoryKind, Sleeping] = {}

    @property
    def asleep(self) -> Set[MemoryKind]:
        return self._asleep.keys()

    def reserve(self, nbytes: int, group: ProcessGroup | None = None) -> None:
        """Begin to allocate host memory for `nbytes` that will sleep at the same time, on all ranks of `group`.
        Raises MemoryError if the host has too little for its ranks together."""
        self.host.reserve(nbytes + nbytes // 512 + PACK, group)  # alignment takes at most a thousandth

    def release(self, kind: MemoryKind, tensors: Iterable[torch.Tensor]) -> int:
        """Free `kind`; returns the bytes, 0 if it sleeps. Gradients are dropped, the rest is copied to the host first.

        0-d tensors (step counters) stay. Nothing is freed if a copy fails. The freed memory goes to the device's
        caching allocator.
        """
        if kind in self._asleep:
            return 0
        groups = list(_grouped(_storages(tensors)))
        if kind is MemoryKind.GRAD:  # without a host copy: they come back as zeros
            sleeping = Sleeping([Part(group, [storage.nbytes() for storage in group]) for group in groups])
        else:
            sleeping = self._copied(groups)
        # All copies are done before the first storage is freed: running out of host memory changes nothing.
        _empty(sleeping.parts)
        self._asleep[kind] = sleeping
        return sleeping.nbytes

    def restore(self, kind: MemoryKind) -> int:
        """Restore `kind`, gradients as zeros; returns the bytes, as many as were freed, 0 if it is awake.

        If it fails for lack of device memory, all of `kind` stays asleep and can be restored later."""
        sleeping = self._asleep.get(kind)
        if sleeping is None:
            return 0
        try:
            with self._copies:
                for part in sleeping.parts:
                    for storage, size in zip(part.storages, part.sizes, strict=True):
                        storage.resize_(size)
                    self._copies.to_device(part)  # runs while memory is allocated for the next part
        except BaseException:
            _empty(sleeping.parts)
            raise
        self.host.give_back(sleeping.pieces)
        del self._asleep[kind]
        return sleeping.nbytes

    def close(self) -> None:
        """Release the host memory. Sleeping contents are lost."""
        self.host.close()
        self._asleep.clear()

    def _copied(self, groups: Sequence[Sequence[torch.UntypedStorage]]) -> Sleeping:
        sizes = [[storage.nbytes() for storage in group] for group in groups]
        rooms = [sum(each) if sum(each) < SMALL else -(-sum(each) // ALIGNMENT) * ALIGNMENT for each in sizes]
        pieces = self.host.take(sum(rooms))
        try:
            parts = [Part(*each) for each in zip(groups, sizes, cut(pieces, rooms), strict=True)]
            with self._copies:
                for part in parts:
                    self._copies.to_host(part)
        except BaseException:
            self.host.give_back(pieces)
            raise
        return Sleeping(parts, pieces)


class CopyStream:
    """Asynchronous copies: `with copies: copies.to_host(part)`; all are done when the block ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        if self._device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(self._device)
            # Kernels on any stream may still write what is copied, or use the memory that is overwritten.
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
        """Copy back; the storages must have their size again."""
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
        """Run a block on the copy stream. Not for `resize_`: memory belongs to the stream that allocated it."""
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()


def resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' distinct storages, as they are now."""
    return sum(storage.nbytes() for storage in _storages(tensors, scalars=True))


def _storages(tensors: Iterable[torch.Tensor], *, scalars: bool = False) -> Iterator[torch.UntypedStorage]:
    """The distinct non-empty storages; for a DTensor, that of its local part."""
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
    """Group storages: large ones first, each alone; then small ones of one device, up to PACK bytes together."""
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


def _empty(parts: Iterable[Part]) -> None:
    for part in parts:
        for storage in part.storages:
            storage.resize_(0)


def _facing(part: Part, whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of host and device memory for the same bytes; the host memory may be longer in total."""
    for host in part.host:
        device, whole = whole[: host.numel()], whole[host.numel() :]
        yield host[: device.numel()], device


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """[nbytes] uint8 view of the storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@frozen(eq=False)
class Saved:
    """One host tensor for each chunk, and the memory behind them."""

    tensors: list[torch.Tensor]
    pieces: list[Piece]


class HostWeights:
    """Snapshots of this rank's own chunks. Chunks must be given in the same order every time, replicas included, since
    a swap must reach every view."""

    def __init__(self, host: HostMemory | None = None) -> None:
        """`host` provides the memory: the host memory of a rank's sleep has room for a swap while the rank is awake."""
        self._host = host or HostMemory()
        self._kept: dict[str, Saved] = {}

    def save(self, name: str, chunks: Sequence[Chunk]) -> None:
        """Keep the views' current contents as snapshot `name`, replacing any earlier one."""
        with self._room(chunks) as saved:
            _copy(zip(saved.tensors, _views(chunks), strict=True))
            self._keep(name, saved)

    def load(self, name: str, chunks: Sequence[Chunk], source: TensorSource) -> int:
        """Keep `source`'s tensors in the views' dtypes, reading only this rank's boxes; returns the bytes read.

        The views are not touched. Raises ModelError if the source does not fit; an earlier snapshot is then kept.
        """
        with self._room(chunks) as saved:
            boxes = [evolve(chunk, view=host) for chunk, host in zip(chunks, saved.tensors, strict=True)]
            read = fill(boxes, source, what=f"the source of snapshot {name!r}")
            self._keep(name, saved)
        return read

    def drop(self, name: str) -> None:
        self._host.give_back(self._get(name).pieces)
        del self._kept[name]

    @contextlib.contextmanager
    def swapped(self, name: str, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Run the block with the snapshot in the views; afterwards, even on an error, restore their own bits."""
        kept = self._get(name)
        with self._room(chunks) as previous:
            _copy(zip(previous.tensors, _views(chunks), strict=True))
            try:
                _copy(zip(_views(chunks), kept.tensors, strict=True))
                yield
            finally:
                _copy(zip(_views(chunks), previous.tensors, strict=True))

    def _get(self, name: str) -> Saved:
        if name not in self._kept:
            known = ", ".join(sorted(self._kept)) or "none"
            raise WrongState(f"no snapshot {name!r}; known: {known}; create or load it first")
        return self._kept[name]

    def _keep(self, name: str, saved: Saved) -> None:
        if name in self._kept:
            self.drop(name)
        self._kept[name] = saved

    @contextlib.contextmanager
    def _room(self, chunks: Sequence[Chunk]) -> Iterator[Saved]:
        """Uninitialized host tensors for the chunks; released at the end unless they were kept."""
        sizes = [-(-chunk.view.nbytes // ALIGNMENT) * ALIGNMENT for chunk in chunks]
        pieces = self._host.take(sum(sizes))
        saved = Saved([_shaped(*each) for each in zip(cut(pieces, sizes), chunks, strict=True)], pieces)
        try:
            yield saved
        finally:
            if saved not in self._kept.values():
                self._host.give_back(pieces)


def _shaped(slices: Sequence[torch.Tensor], chunk: Chunk) -> torch.Tensor:
    """The memory as a tensor of the chunk's shape and dtype. The few chunks that would span two segments get separate
    memory."""
    shape, dtype = tuple(chunk.sizes), chunk.view.dtype
    if len(slices) != 1:
        return torch.empty(shape, dtype=dtype)
    return slices[0][: chunk.view.nbytes].view(dtype).view(shape)


def _views(chunks: Sequence[Chunk]) -> list[torch.Tensor]:
    return [chunk.view for chunk in chunks]


@torch.no_grad()
def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair over the first; returns when all copies are done."""
    devices = set()
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
        devices |= {target.device, source.device}
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
