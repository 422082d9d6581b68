"""Send each bucket as one compressed file: the transport `disk`, with other files."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from corerl.errors import WeightUpdateError
from corerl.weights import Address, Bucket, DiskReceiver, DiskSender, Manifest
from corerl_zipped import ZippedOptions


def file_of(bucket: Bucket) -> str:
    return f"bucket-{bucket.index:05d}.z"


class ZippedSender(DiskSender):
    """Writes what has been compressed, and counts its bytes."""

    def __init__(self, address: Address, rank: int) -> None:
        super().__init__(address, rank)
        self._level = ZippedOptions(**address.options).level

    def begin(self, manifest: Manifest, version: int) -> None:
        self.sent = 0
        super().begin(manifest, version)

    def transmit(self, bucket: Bucket, flat: torch.Tensor) -> None:
        data = zlib.compress(flat.view(torch.uint8).numpy(), self._level)
        (self.partial / file_of(bucket)).write_bytes(data)
        self.sent = (self.sent or 0) + len(data)


class ZippedReceiver(DiskReceiver):
    """Reads it. The base class verifies the checksum of what `read` returns."""

    def prepare(self, manifest: Manifest) -> None:
        self._dtype = getattr(torch, manifest.dtype)

    def read(self, bucket: Bucket, directory: Path, content: Mapping[str, Any]) -> torch.Tensor:
        try:
            data = bytearray(zlib.decompress((directory / file_of(bucket)).read_bytes()))
        except (OSError, zlib.error) as error:
            raise WeightUpdateError(f"cannot read {directory / file_of(bucket)}: {error}") from error
        return torch.frombuffer(data, dtype=self._dtype)
