"""Send buckets through a shared directory: one subdirectory per version, published by one rename, in safetensors.

    PATH/v00000007-TOKEN/bucket-00000.safetensors   one flat tensor, `bucket`
    PATH/v00000007-TOKEN/manifest.json              digest of the manifest, and the checksum of each bucket
    PATH/abandoned-TOKEN                            ends the wait of receivers at the address with this token; the
                                                    sender of another address removes it

Engines read what is complete; the sender waits for nobody. The token distinguishes this update from one of the same
version left behind by an earlier run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from corerl.errors import WeightUpdateError
from corerl.weights import Address, Arriving, Bucket, Manifest, Receiver, WeightSender, checksum

PARTIAL = ".partial"
POLL_SECONDS = 0.005
TENSOR = "bucket"


def _directory(address: Address, version: int) -> Path:
    return Path(address.path) / f"v{version:08d}-{address.token}"


def _clear(path: str) -> None:
    """Remove all versions' directories, including partial and earlier runs', but none of the user's own."""
    for each in Path(path).glob("v*"):
        if re.fullmatch(rf"v\d{{8,}}-[0-9a-z]*({re.escape(PARTIAL)})?", each.name):
            shutil.rmtree(each, ignore_errors=True)


def _abandoned(address: Address) -> Path:
    return Path(address.path) / f"abandoned-{address.token}"


def bucket_file(index: int) -> str:
    """The name of a whole bucket's file in a version's directory."""
    return f"bucket-{index:05d}.safetensors"


class DiskSender(WeightSender):
    """Writes each version. It is removed when the next one is written, or at the end."""

    def __init__(self, address: Address, rank: int = 0, lost: Mapping[str, str] | None = None) -> None:
        super().__init__(address, rank, lost)
        self._checksums: list[int] = []
        self._digest = ""
        self.partial: Path | None = None  # directory of the update being written; None on a rank that never sends

    def open(self, manifest: Manifest, version: int) -> None:
        self._checksums, self._digest = [], manifest.digest
        self.directory = _directory(self.address, version)
        self.partial = self.directory.with_name(f"{self.directory.name}{PARTIAL}")
        _clear(self.address.path)  # engines have read the last version, or are not waited for any more
        self.partial.mkdir(parents=True)

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        assert self.partial is not None
        flat = flat.detach().cpu().contiguous()  # the receiver computes the checksum of the file, on the host
        self._checksums.append(checksum(flat))
        try:
            self.transmit(bucket, flat, self.partial)
        except Exception as error:  # OSError, or the safetensors library's own
            raise WeightUpdateError(f"cannot write bucket {bucket.index} to {self.partial}: {error}") from error

    def transmit(self, bucket: Bucket, flat: torch.Tensor, directory: Path) -> None:
        """Write one bucket."""
        save_file({TENSOR: flat}, directory / bucket_file(bucket.index))

    def content(self) -> Mapping[str, Any]:
        """What manifest.json holds."""
        return {"digest": self._digest, "checksums": self._checksums}

    def finish(self) -> Mapping[str, str]:
        """Publish the update."""
        assert self.partial is not None
        (self.partial / "manifest.json").write_text(json.dumps(self.content()))
        os.replace(self.partial, self.directory)
        return {}

    def close(self) -> None:
        """Remove all versions, since the engines have loaded the last one. A rank that never sent removes nothing, as
        another rank may still be writing."""
        if self.partial is None:
            return
        _clear(self.address.path)
        for mark in Path(self.address.path).glob("abandoned-*"):
            if mark != _abandoned(self.address):  # at which an engine may yet begin to wait
                mark.unlink(missing_ok=True)


class DiskReceiver(Receiver):
    """Reads each version when it is complete."""

    def receive(self, manifest: Manifest, version: int) -> Arriving:
        directory = _directory(self.address, version)
        self._wait_for(directory)
        content = json.loads((directory / "manifest.json").read_text())
        if content["digest"] != manifest.digest:
            raise WeightUpdateError(
                f"{directory} holds other tensors than {self.address.engines[self.index]} expects; give both the "
                "manifest of this update"
            )
        for bucket, sent in zip(manifest.buckets, content["checksums"], strict=True):
            yield bucket, self._read(bucket, directory, content), sent

    def read(self, bucket: Bucket, directory: Path, content: Mapping[str, Any]) -> torch.Tensor:
        """Read one bucket [bucket.numel] of the update in `directory`; `content` is its manifest.json."""
        return load_file(directory / bucket_file(bucket.index))[TENSOR]

    def placed(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.to(self.address.device)

    def close(self) -> None:
        pass

    @staticmethod
    def abandon(address: Address) -> None:
        """End the wait of receivers at this address: nothing will come. Never raises: they may wait in vain."""
        with contextlib.suppress(OSError):
            Path(address.path).mkdir(parents=True, exist_ok=True)
            _abandoned(address).touch()

    def _wait_for(self, directory: Path) -> None:
        deadline = time.monotonic() + self.patience  # the sender may be writing, too
        while not directory.exists():
            if _abandoned(self.address).exists():
                raise WeightUpdateError(f"{directory} was not written: its sender has failed or ended")
            if time.monotonic() > deadline:
                raise WeightUpdateError(
                    f"{directory} was not written within {self.patience:g} s; raise cluster.timeout, or use a "
                    f"weights.transport other than {self.address.transport!r}"
                )
            time.sleep(POLL_SECONDS)

    def _read(self, bucket: Bucket, directory: Path, content: Mapping[str, Any]) -> torch.Tensor:
        try:
            return self.read(bucket, directory, content)
        except Exception as error:  # OSError, or the reading library's own
            raise WeightUpdateError(f"cannot read bucket {bucket.index} in {directory}: {error}") from error
