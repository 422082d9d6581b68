"""Measure the memory of the tensors that a block of code creates."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """`with Allocations() as found:` then `found.peak`, `found.largest` in bytes.

    Counts each storage that an operation in this thread creates, until the last tensor that uses it is gone. Existing
    storages do not count, nor do tensors without memory: on meta, or memory-mapped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0  # bytes of the largest storage
        self.peak = 0  # most bytes held at once
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def held(self) -> int:
        """Bytes held now."""
        return sum(storage.nbytes() for ref in self._live.values() if (storage := ref()) is not None)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the call comes back with the local tensors, which have the memory
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in given:
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        known = self._live.get(storage._cdata)
        if known is None or known() is not storage:
            self._live[storage._cdata] = weakref.ref(storage)
        self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, self.held)


def _storages(tree: Any) -> Iterable[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.device.type != "meta":
            yield leaf.untyped_storage()
