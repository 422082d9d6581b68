from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from corerl.weights.shared import ALLOCATOR, CudaPinning, outside_expandable_segments


def settings() -> str:
    """What torch's allocator was told last."""
    return str(torch._C._accelerator_getAllocatorSettings())


@pytest.fixture
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("this torch does not tell what its allocator was set to")
    before = settings()
    yield monkeypatch
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize("name", ALLOCATOR)
def test_shared_memory_alone_is_outside_expandable_segments(as_it_was: pytest.MonkeyPatch, name: str) -> None:
    users = "expandable_segments:True,max_split_size_mb:64"
    as_it_was.setenv(name, users)
    with outside_expandable_segments():
        assert settings() == "expandable_segments:False"
    assert settings() == users
    with pytest.raises(MemoryError), outside_expandable_segments():
        raise MemoryError
    assert settings() == users


def test_an_allocator_without_expandable_segments_is_left_alone(as_it_was: pytest.MonkeyPatch) -> None:
    before = settings()
    as_it_was.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    with outside_expandable_segments():
        assert settings() == before
    assert settings() == before


class Cudart:
    """As much of torch's binding as is called."""

    class cudaError:
        success = 0

    def __init__(self, status: int) -> None:
        self.status, self.log = status, list[tuple[object, ...]]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.log.append(("register", address, nbytes, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append(("unregister", address))
        return self.status

    def cudaGetErrorString(self, status: int) -> str:
        return {1: "invalid argument"}[status]


@pytest.mark.parametrize(("status", "reason"), [(0, ""), (1, "invalid argument")])
def test_cuda_pinning_uses_the_ranks_device_and_reports_refusals(
    status: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart, device, memory = Cudart(status), torch.device("cuda", 3), torch.empty(77, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: cudart.log.append(("device", device)))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    assert CudaPinning(device).pin(memory) == reason
    assert cudart.log == [("device", device), ("register", memory.data_ptr(), 77, 0)]
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: cudart.log.append(("check", status)))
    CudaPinning(device).unpin(memory)
    assert cudart.log[2:] == [("unregister", memory.data_ptr()), ("check", status)]
