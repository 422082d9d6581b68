"""Send only what changed since the previous update, through a shared directory: the `disk` transport, other files.

    PATH/v00000007-TOKEN/changes-00000.bin          from the bits of the last update to those of this one
    PATH/v00000007-TOKEN/bucket-00000.safetensors   a whole bucket: if changes are not smaller, or none is to be had
    PATH/v00000007-TOKEN/manifest.json              as in `disk`; also `changes`, the buckets sent as changes

Both ends keep the last update's bits in host memory. The first update at an address is sent whole, and wherever an
engine is new, has failed or missed an update, the next one is at another address. Checksums are of whole buckets, so
that they verify what a receiver has reconstructed, not just what it read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from corerl.weights import Address, Bucket, Manifest
from corerl_delta.changes import apply_changes, encode_changes
from corerl_delta.disk import DiskReceiver, DiskSender


def _changes_file(index: int) -> str:
    return f"changes-{index:05d}.bin"


def _bits(flat: torch.Tensor) -> NDArray[Any]:
    """View a host tensor's elements as unsigned integers."""
    return flat.view(torch.uint8).numpy().view(f"u{flat.element_size()}")


class DeltaSender(DiskSender):
    """Keeps a copy of what it sent last, and writes the changes since then."""

    def __init__(self, address: Address, rank: int = 0, lost: Mapping[str, str] | None = None) -> None:
        super().__init__(address, rank, lost)
        self._kept: dict[int, torch.Tensor] = {}  # by bucket
        self._kept_digest = ""  # of the manifest that `_kept` follows
        self._changes: list[int] = []  # buckets of this update sent as changes

    def open(self, manifest: Manifest, version: int) -> None:
        super().open(manifest, version)
        if manifest.digest != self._kept_digest:
            self._kept, self._kept_digest = {}, manifest.digest
        self._changes, self.bytes_sent = [], 0

    def transmit(self, bucket: Bucket, flat: torch.Tensor, directory: Path) -> None:
        before = self._kept.get(bucket.index)
        data = None if before is None else encode_changes(_bits(before), _bits(flat))
        if data is None:
            super().transmit(bucket, flat, directory)
        else:
            (directory / _changes_file(bucket.index)).write_bytes(data)
            self._changes.append(bucket.index)
        self.bytes_sent = (self.bytes_sent or 0) + (flat.nbytes if data is None else len(data))
        self._kept[bucket.index] = flat.clone() if before is None else before.copy_(flat)

    def content(self) -> Mapping[str, Any]:
        return {**super().content(), "changes": self._changes}

    def close(self) -> None:
        super().close()
        self._kept = {}


class DeltaReceiver(DiskReceiver):
    """Keeps a copy of what it received last, and applies changes to it."""

    def __init__(self, address: Address, index: int) -> None:
        super().__init__(address, index)
        self._kept: dict[int, torch.Tensor] = {}  # by bucket

    def read(self, bucket: Bucket, directory: Path, content: Mapping[str, Any]) -> torch.Tensor:
        if bucket.index in content["changes"]:
            changed = self._kept[bucket.index]
            apply_changes((directory / _changes_file(bucket.index)).read_bytes(), _bits(changed))
            return changed
        whole = super().read(bucket, directory, content)
        kept = self._kept.get(bucket.index)  # memory that is there is written over: new memory costs more
        if kept is None or (kept.dtype, kept.shape) != (whole.dtype, whole.shape):
            kept = self._kept[bucket.index] = torch.empty_like(whole)
        return kept.copy_(whole)

    def close(self) -> None:
        self._kept = {}
