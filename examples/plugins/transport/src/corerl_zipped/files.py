"""Send each bucket as one compressed file: the transport `disk`, with other files."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from corerl.weights import Address, Arriving, Bucket, Manifest
from corerl_delta.disk import DiskReceiver, DiskSender
from corerl_zipped import ZippedOptions


def file_of(bucket: Bucket) -> str:
    return f"bucket-{bucket.index:05d}.z"


class ZippedSender(DiskSender):
    """Writes what has been compressed, and counts its bytes."""

    def __init__(self, address: Address, rank: int, lost: Mapping[str, str] | None) -> None:
        super().__init__(address, rank, lost)
        self._level = ZippedOptions(**address.options).level

    def open(self, manifest: Manifest, version: int) -> None:
        self.bytes_sent = 0
        super().open(manifest, version)

    def transmit(self, bucket: Bucket, flat: torch.Tensor, directory: Path) -> None:
        data = zlib.compress(flat.view(torch.uint8).numpy(), self._level)
        (directory / file_of(bucket)).write_bytes(data)
        self.bytes_sent = (self.bytes_sent or 0) + len(data)


class ZippedReceiver(DiskReceiver):
    """Reads it. The base class verifies the checksum of what `read` returns, and words what it raises."""

    def receive(self, manifest: Manifest, version: int) -> Arriving:
        self._dtype = getattr(torch, manifest.dtype)
        return super().receive(manifest, version)

    def read(self, bucket: Bucket, directory: Path, content: Mapping[str, Any]) -> torch.Tensor:
        data = bytearray(zlib.decompress((directory / file_of(bucket)).read_bytes()))
        return torch.frombuffer(data, dtype=self._dtype)
