"""Handles of CUDA IPC between processes on one GPU; needs one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from corerl.weights import bit_sums
from corerl_testing import open_sender
from corerl_transports.shared import ALLOCATOR
from tests.weights.ends import address_of, peer, push, weights

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.processes,
]


@pytest.fixture(params=["", "expandable_segments:True"])
def allocator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's, as a user may have set it before the process began."""
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    if request.param:
        monkeypatch.setenv(ALLOCATOR[-1], request.param)
        torch._C._accelerator_setAllocatorSettings(request.param)
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_engines_on_the_gpu_leave_nothing_allocated(allocator: None) -> None:
    address = address_of("ipc", "a", "b", device="cuda", timeout=60.0)
    sender = open_sender(address)
    before = torch.cuda.memory_allocated()
    loads = ["load"] * 5
    with peer(address, 0, "small", *loads, "load") as first, peer(address, 1, "small", *loads, "die") as second:
        for version in range(1, 6):
            sent = {name: tensor.cuda() for name, tensor in weights(version).items()}
            assert not any(push(sender, address, sent, version).values())
            assert first() == second() == {"error": "", "sums": bit_sums(weights(version))}
        failed = push(sender, address, sent, 6)
        assert "its process ended" in failed["b"] and not failed.get("a")
        assert first() == {"error": "", "sums": bit_sums(weights(5))}
        del sent
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated() == before  # what the dead one had opened too
    sender.close()
