"""Share memory with another process on this machine by handle: CUDA IPC on a GPU, an anonymous file on the host."""

from __future__ import annotations

import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from corerl.errors import WeightUpdateError

# Plain data. Host memory is opened by a file descriptor sent alongside, of which the receiver gets its own.
Handle = Mapping[str, Any]

# Where a user configures torch's allocator: the first variable that is set counts.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Shared(ABC):
    """Memory [nbytes] of this process that others can open."""

    bytes: torch.Tensor  # [nbytes] uint8

    @abstractmethod
    def handle(self) -> tuple[Handle, list[int]]:
        """A handle for one other process, and the file descriptors to send with it. The receiver closes its handle;
        call `forget` if it died first."""

    @abstractmethod
    def forget(self, handle: Handle) -> None:
        """Release a handle whose receiver ended without closing it."""

    @abstractmethod
    def close(self) -> None: ...


def share(nbytes: int, device: torch.device) -> Shared:
    """Allocate uninitialized memory on `device`."""
    return SharedOnDevice(nbytes, device) if device.type == "cuda" else SharedOnHost(nbytes)


def opened(handle: Handle, descriptors: list[int]) -> torch.Tensor:
    """Open the bytes [nbytes] uint8 that another process shares; they are closed when no view of them is left.

    Raises WeightUpdateError if they are on another GPU than this process's.
    """
    if handle["kind"] == "host":
        (descriptor,) = descriptors
        try:
            return torch.frombuffer(mmap.mmap(descriptor, handle["nbytes"]), dtype=torch.uint8)
        finally:
            os.close(descriptor)  # the mapping stays valid
    if (own := device_id()) != handle["device"]:
        raise WeightUpdateError(
            f"the shared weights are on GPU {handle['device']}, but this process uses {own}; place the engine on its "
            "trainer rank's GPU, or use another weights.transport"
        )
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle["parts"]]
    storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def device_id() -> str:
    """The UUID of this process's GPU, independent of how each process numbers GPUs."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class SharedOnHost(Shared):
    """An anonymous file in memory. It disappears with the last process that has it open, however that ends, and does
    not use /dev/shm, which is small in containers."""

    def __init__(self, nbytes: int, name: str = "corerl-weights") -> None:
        self._nbytes = nbytes
        self._descriptor = os.memfd_create(name)
        try:
            os.ftruncate(self._descriptor, nbytes)
            self.bytes = torch.frombuffer(mmap.mmap(self._descriptor, nbytes), dtype=torch.uint8)
        except OSError:
            self.close()
            raise

    def handle(self) -> tuple[Handle, list[int]]:
        return {"kind": "host", "nbytes": self._nbytes}, [self._descriptor]

    def forget(self, handle: Handle) -> None:
        pass  # closed by the system

    def close(self) -> None:
        os.close(self._descriptor)


class SharedOnDevice(Shared):
    """Device memory. torch counts the open handles, and keeps the memory until all are closed."""

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
    """Allocate outside expandable segments inside the block, even if the user has enabled them.

    Their handles are file descriptors that the receiver takes from this process, which containers forbid
    (https://github.com/pytorch/pytorch/issues/165685) and torch 2.11 gets wrong (issues/179220 there).
    """
    settings = next(filter(None, map(os.environ.get, ALLOCATOR)), "")
    if "expandable_segments:true" not in settings.lower().replace(" ", ""):
        yield
        return
    # torch 2.9 lacks the first, and 2.11 deprecates the second.
    configure = (
        getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    )
    configure("expandable_segments:False")
    try:
        yield
    finally:
        configure(settings)
