"""Handles of CUDA IPC between processes on one GPU; needs one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import torch

from corerl.weights.shared import ALLOCATOR
from corerl.weights.transport import Address
from tests.weights.transports.test_transports import FlipsIpc, Peer, push, sums_of, weights

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


def test_two_engines_on_the_gpu_hold_what_was_sent_and_nothing_stays_allocated(allocator: None) -> None:
    address = Address(
        transport="ipc", engines=("a", "b"), token=uuid.uuid4().hex, senders=(0, 0), device="cuda", timeout=60.0
    )
    peers = [Peer(address, index) for index in range(2)]
    sender = FlipsIpc(address, 0)
    before = torch.cuda.memory_allocated()
    try:
        for peer in peers:
            peer.answer()
        for version in range(1, 6):
            sent = {name: tensor.cuda() for name, tensor in weights(version).items()}
            for peer in peers:
                peer.order(version)
            assert push(sender, sent, version) == {"a": "", "b": ""}
            assert [peer.answer() for peer in peers] == [
                {"version": version, "error": "", "sums": sums_of(weights(version))}
            ] * 2
        sender.flips = True
        for peer in peers:
            peer.order(6)
        assert all("was damaged in transit" in error for error in push(sender, sent, 6).values())
        sender.flips = False
        assert [peer.answer()["version"] for peer in peers] == [5, 5]
        peers[0].order(7)
        peers[1].order(7, "die")
        answers = push(sender, sent, 7)
        assert answers["a"] == "" and "its process ended" in answers["b"]
        assert peers[0].answer()["version"] == 7
        del sent
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated() == before  # what the dead one had opened too
    finally:
        for peer in peers:
            peer.close()
        sender.close()
