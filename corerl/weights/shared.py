"""Memory that another process of this machine can open by a handle: CUDA IPC on a GPU, a nameless file on the host."""

from __future__ import annotations

import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from corerl.errors import WeightUpdateError

# Plain data. What the host's memory is opened by, a file descriptor, goes beside it: the system gives the receiver one
# of its own.
Handle = Mapping[str, Any]

# Where a user sets torch's allocator: the first one that is set counts.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Shared(ABC):
    """Bytes [nbytes] of this process."""

    bytes: torch.Tensor  # [nbytes] uint8

    @abstractmethod
    def handle(self) -> tuple[Handle, list[int]]:
        """A handle for one other process, and the file descriptors to send with it. Each handle that is given out is
        closed by whom it was given to, or by `forget` where that process has died."""

    @abstractmethod
    def forget(self, handle: Handle) -> None:
        """Its process has ended without closing it."""

    @abstractmethod
    def close(self) -> None: ...


def share(nbytes: int, device: torch.device) -> Shared:
    """New memory on `device`, not initialised."""
    return SharedOnDevice(nbytes, device) if device.type == "cuda" else SharedOnHost(nbytes)


def opened(handle: Handle, descriptors: list[int]) -> torch.Tensor:
    """The bytes [nbytes] uint8 that another process shares; they are closed when no view of them is left.

    Raises WeightUpdateError where they lie on another GPU than this process's.
    """
    if handle["kind"] == "host":
        (descriptor,) = descriptors
        try:
            return torch.frombuffer(mmap.mmap(descriptor, handle["nbytes"]), dtype=torch.uint8)
        finally:
            os.close(descriptor)  # the mapping stays
    if (own := device_id()) != handle["device"]:
        raise WeightUpdateError(
            f"weights lie on the GPU {handle['device']}, and this process is on {own}: a handle is opened on the GPU "
            "that it is of; place the engine on its rank's GPU, or take another weights.transport"
        )
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle["parts"]]
    storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def device_id() -> str:
    """What this process's GPU is known by in every process, however each one numbers them."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class SharedOnHost(Shared):
    """A file without a name, in memory: it is gone when the last process that has it open is, however that ends, and
    /dev/shm, which is small in containers, has no part in it."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._descriptor = os.memfd_create("corerl-weights")
        try:
            os.ftruncate(self._descriptor, nbytes)
            self.bytes = torch.frombuffer(mmap.mmap(self._descriptor, nbytes), dtype=torch.uint8)
        except OSError:
            self.close()
            raise

    def handle(self) -> tuple[Handle, list[int]]:
        return {"kind": "host", "nbytes": self._nbytes}, [self._descriptor]

    def forget(self, handle: Handle) -> None:
        pass  # the system has closed it

    def close(self) -> None:
        os.close(self._descriptor)


class SharedOnDevice(Shared):
    """torch counts the handles that are out, and keeps the memory until all are closed."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with outside_expandable_segments():
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def handle(self) -> tuple[Handle, list[int]]:
        # (device, handle of the allocation, bytes, offset in the allocation, two of a counter, two of an event)
        _, *parts = self.bytes.untyped_storage()._share_cuda_()
        plain = [part.hex() if isinstance(part, bytes) else part for part in parts]
        return {"kind": "cuda", "device": device_id(), "parts": plain}, []

    def forget(self, handle: Handle) -> None:
        _, _, _, counter, offset, *_ = handle["parts"]
        torch.UntypedStorage._release_ipc_counter_cuda(bytes.fromhex(counter), offset)

    def close(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        torch.cuda.ipc_collect()


@contextlib.contextmanager
def outside_expandable_segments() -> Iterator[None]:
    """What is allocated here lies in no expandable segment, also where the user has these switched on.

    A handle of one is a file descriptor that the receiver takes out of this process, which containers forbid
    (https://github.com/pytorch/pytorch/issues/165685) and torch 2.11 gets wrong (issues/179220 there).
    """
    settings = next(filter(None, map(os.environ.get, ALLOCATOR)), "")
    if "expandable_segments:true" not in settings.lower().replace(" ", ""):
        yield
        return
    # torch 2.9 does not have the first, and 2.11 deprecates the second.
    configure = (
        getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    )
    configure("expandable_segments:False")
    try:
        yield
    finally:
        configure(settings)
