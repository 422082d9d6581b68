"""Send only what changed since the previous update, through a shared directory: the `disk` transport, other files.

    PATH/v00000007/changes-00000.bin          from the bits of `base` to those of this update (`corerl_delta.changes`)
    PATH/v00000007/bucket-00000.safetensors   a whole bucket: if changes are not smaller, or a receiver needs it
    PATH/v00000007/manifest.json              as in `disk`; also `stamp`, which names this update, `base`, the stamp of
                                              the previous one, and `changes`, the buckets sent as changes

Both ends keep the last update's bits in host memory. A receiver states in its request which update it holds. If that is
not the base, because it is new, failed or missed an update, whole buckets are written too before it is admitted.
Checksums are of whole buckets, so that they verify what a receiver has reconstructed, not just what it read.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from corerl.errors import WeightUpdateError
from corerl.weights import Address, Bucket, DiskReceiver, DiskSender, bucket_file
from corerl_delta.changes import apply_changes, encode_changes


def _changes_file(index: int) -> str:
    return f"changes-{index:05d}.bin"


def _bits(flat: torch.Tensor) -> NDArray[Any]:
    """View a host tensor's elements as unsigned integers."""
    return flat.view(torch.uint8).numpy().view(f"u{flat.element_size()}")


class DeltaSender(DiskSender):
    """Keeps a copy of what it sent last, and writes the changes since then."""

    def __init__(self, address: Address, rank: int = 0) -> None:
        super().__init__(address, rank)
        self._digest = ""  # of the manifest that `_kept` follows
        self._kept: dict[int, torch.Tensor] = {}  # by bucket
        self._kept_stamp = ""  # of the update that `_kept` holds; "" if it holds none whole
        self._stamp = ""  # of this update
        self._base = ""  # stamp that its changes are relative to; "" if all buckets are sent whole
        self._changes: list[int] = []  # buckets of this update sent as changes only

    def open(self) -> None:
        super().open()
        if self.manifest.digest != self._digest:
            self._digest, self._kept, self._kept_stamp = self.manifest.digest, {}, ""
        self._base, self._kept_stamp = self._kept_stamp, ""  # `_kept` is a mix of two updates until this one is written
        self._stamp, self._changes, self.sent = uuid.uuid4().hex, [], 0

    def transmit(self, bucket: Bucket, flat: torch.Tensor) -> None:
        data = encode_changes(_bits(self._kept[bucket.index]), _bits(flat)) if self._base else None
        if bucket.index in self._kept:
            self._kept[bucket.index].copy_(flat)
        else:
            self._kept[bucket.index] = flat.clone()
        if data is None:
            self._write_whole(bucket.index, self.partial)
            return
        (self.partial / _changes_file(bucket.index)).write_bytes(data)
        self._changes.append(bucket.index)
        self._count(len(data))

    def told(self) -> Mapping[str, Any]:
        if not self.broken:
            self._kept_stamp = self._stamp
        return {"stamp": self._stamp, "base": self._base, "changes": self._changes}

    def admit(self, index: int) -> None:
        if self.taking[index]["holds"] != self._base and not self.broken:
            for bucket in self._changes:
                if not (self.directory / bucket_file(bucket)).exists():
                    self._write_whole(bucket, self.directory)
        super().admit(index)

    def close(self) -> None:
        super().close()
        self._kept, self._kept_stamp = {}, ""

    def _write_whole(self, index: int, directory: Path) -> None:
        self.write(index, self._kept[index], directory)
        self._count(self._kept[index].nbytes)

    def _count(self, nbytes: int) -> None:
        self.sent = (self.sent or 0) + nbytes


class DeltaReceiver(DiskReceiver):
    """Keeps a copy of what it received last, and applies changes to it."""

    def __init__(self, address: Address, index: int) -> None:
        super().__init__(address, index)
        self._kept: dict[int, torch.Tensor] = {}  # by bucket
        self._stamp = ""  # of the update being read

    def read(self, bucket: Bucket, directory: Path, content: Mapping[str, Any]) -> torch.Tensor:
        self._stamp = content["stamp"]
        if self.holds != content["base"] or bucket.index not in content["changes"]:
            whole = super().read(bucket, directory, content)
            kept = self._kept.get(bucket.index)
            if kept is None or (kept.dtype, kept.shape) != (whole.dtype, whole.shape):
                kept = self._kept[bucket.index] = torch.empty_like(whole)
            return kept.copy_(whole)
        path, kept = directory / _changes_file(bucket.index), self._kept[bucket.index]
        try:
            apply_changes(path.read_bytes(), _bits(kept))
        except Exception as error:  # OSError, or whatever a damaged file causes
            raise WeightUpdateError(f"cannot read {path}: {error}") from error
        return kept

    def leave(self, version: int, error: str, *, joined: bool) -> Mapping[str, Any]:
        self.holds = "" if error else self._stamp
        return super().leave(version, error, joined=joined)

    def close(self) -> None:
        self._kept, self.holds = {}, ""
