"""Give the memory behind tensors back to the device and restore it bit for bit, while every view of it stays valid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from attrs import frozen
from torch.distributed.tensor import DTensor

from corerl.types import MemoryKind


@frozen(eq=False)
class Sleeping:
    """A storage of size 0 and what it held."""

    storage: torch.UntypedStorage
    nbytes: int
    host: torch.Tensor | None  # [nbytes] uint8; None where zeros come back


class StorageSleeper:
    """Storages are resized in place (`untyped_storage().resize_`), so parameters, optimizer state and aliases keep
    their identity. Each storage counts once, and for the kind that was released first."""

    def __init__(self) -> None:
        self._asleep: dict[MemoryKind, list[Sleeping]] = {}
        self._pinned: dict[int, list[torch.Tensor]] = defaultdict(list)  # free host buffers by size; pinning is slow

    def release(self, kind: MemoryKind, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes freed; 0 where `kind` sleeps already. Gradients are dropped, the rest is copied to the host first.

        Tensors of 0 dims (step counters) stay. Nothing is freed where a copy fails. The freed memory goes to the
        device's caching allocator.
        """
        if kind in self._asleep:
            return 0
        copies = kind is not MemoryKind.GRAD
        # All copies are done before the first storage goes: a failure for want of host memory changes nothing.
        sleeping = [
            Sleeping(storage, storage.nbytes(), self._copy(storage) if copies else None)
            for storage in _storages(tensors)
        ]
        _synchronize(sleeping)
        for entry in sleeping:
            entry.storage.resize_(0)
        self._asleep[kind] = sleeping
        return sum(entry.nbytes for entry in sleeping)

    def restore(self, kind: MemoryKind) -> int:
        """Bytes restored, as many as were freed; gradients are zeros. 0 where `kind` is awake."""
        sleeping = self._asleep.get(kind, [])
        for entry in sleeping:
            entry.storage.resize_(entry.nbytes)
            if entry.host is None:
                _bytes_of(entry.storage).zero_()
            else:
                _bytes_of(entry.storage).copy_(entry.host, non_blocking=True)
        _synchronize(sleeping)
        for entry in sleeping:
            if entry.host is not None and entry.host.is_pinned():
                self._pinned[entry.nbytes].append(entry.host)
        self._asleep.pop(kind, None)
        return sum(entry.nbytes for entry in sleeping)

    def _copy(self, storage: torch.UntypedStorage) -> torch.Tensor:
        on_device = storage.device.type == "cuda"
        free = self._pinned[storage.nbytes()]
        host = free.pop() if free else torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_device)
        return host.copy_(_bytes_of(storage), non_blocking=True)


def resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages that the tensors lie in now."""
    return sum(storage.nbytes() for storage in _storages(tensors, scalars=True))


def _storages(tensors: Iterable[torch.Tensor], *, scalars: bool = False) -> Iterator[torch.UntypedStorage]:
    """The distinct, non-empty storages, of a DTensor that of its local part."""
    seen: set[int] = set()
    for tensor in tensors:
        with torch.no_grad():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.ndim == 0 and not scalars:
            continue
        storage = local.untyped_storage()
        if storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """[nbytes] uint8, the storage itself."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(sleeping: Iterable[Sleeping]) -> None:
    for device in {entry.storage.device for entry in sleeping}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
