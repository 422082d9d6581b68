from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from corerl.engines import receiving
from corerl.weights.manifest import Bucket, Manifest, build_manifest
from corerl.weights.transport import Address


class Lender:
    """Lends its memory for a bucket, and looks whether it has it back when the update ends."""

    back = False
    error = ""

    def buckets(self, manifest: Manifest, version: int) -> Iterator[tuple[Bucket, torch.Tensor]]:
        flat = torch.zeros(4)
        self._lent = weakref.ref(flat)
        yield manifest.buckets[0], flat

    def acknowledge(self, version: int, error: str) -> None:
        self.back, self.error = self._lent() is None, error

    def close(self) -> None: ...


@pytest.mark.parametrize("error", ["", "it does not fit"])
def test_a_buckets_memory_is_given_back_before_the_sender_is_told_how_loading_went(
    monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    lender = Lender()
    monkeypatch.setattr(receiving, "open_receiver", lambda address, *, index: lender)

    def load(bucket: Bucket, flat: torch.Tensor) -> None:
        if error:
            raise ValueError(error)

    manifest = build_manifest([("a", (4,))], dtype="float32", bucket_bytes=16)
    address = Address(transport="ipc", engines=("engine-0",))
    told = receiving.Receiving(0).transfer(manifest, 1, address, load=load)
    assert told == ((0, f"ValueError: {error}") if error else (16, ""))
    assert (lender.back, lender.error) == (True, told[1])
