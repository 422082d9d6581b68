"""What a rank of the server keeps mapped of the adapters that it writes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from corerl.weights import build_manifest
from corerl_sglang import loader
from corerl_sglang.adapters import Packed, Room


class Pinning:
    """As CudaPinning on a GPU, which the test says there is."""

    pinned: ClassVar[list[int]] = []

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pin_apart(self, memory: torch.Tensor) -> str:
        self.pinned.append(memory.data_ptr())
        return ""

    def unpin(self, memory: torch.Tensor) -> None:
        self.pinned.remove(memory.data_ptr())


def test_files_that_are_closed_are_unpinned_and_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CudaPinning", Pinning)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(loader, "MAPPED", {})
    packed = Packed.of(build_manifest([("base_model.model.layers.0.up_proj.lora_A.weight", (2, 8))], dtype="float32"))

    def mapped(room: Room) -> Any:
        return loader._mapped(room.path, packed.nbytes)

    first, second = Room(packed), Room(packed)
    mapped(first).fill_(1)
    assert mapped(second).fill_(2).data_ptr() != mapped(first).data_ptr() and mapped(first).tolist() == [1] * 64
    first.close()
    other = Room(packed)  # it takes the path of the first one
    assert other.path == first.path
    third = mapped(other)
    assert third.tolist() == [0] * 64
    assert Pinning.pinned == [mapped(second).data_ptr(), third.data_ptr()] and len(loader.MAPPED) == 2
