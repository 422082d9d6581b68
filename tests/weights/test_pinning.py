from __future__ import annotations

import pytest
import torch

from corerl.weights.pinning import CudaPinning


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
