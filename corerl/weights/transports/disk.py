"""Send buckets through a shared directory: one subdirectory per version, published by one rename, in safetensors.

    PATH/v00000007/bucket-00000.safetensors   one flat tensor, `bucket`
    PATH/v00000007/manifest.json              checksum of each bucket; or the sender's error
    PATH/v00000007/for-NONCE                  the answer to the receiver that asked with this nonce
    PATH/engine-0.json                        what receiver 0 has said last, with the nonce that it has asked with
    PATH/given-up-TOKEN                       ends the wait of receivers at the address with this token

Nobody is met before the first bucket: engines read what is complete. The token and the nonce, which is fresh for each
question, distinguish this update from one of the same version left behind by an earlier run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from corerl.errors import WeightUpdateError
from corerl.weights.checksums import checksum
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import Address
from corerl.weights.transports.protocol import Receiver, Sender

PARTIAL = ".partial"
GIVEN_UP = "given-up-"
POLL_SECONDS = 0.005
TENSOR = "bucket"


def _directory(path: str, version: int) -> Path:
    return Path(path) / f"v{version:08d}"


def _directories(path: str) -> list[Path]:
    """All versions' directories, including partial ones, but none of the user's own."""
    return [each for each in Path(path).glob("v*") if re.fullmatch(rf"v\d{{8,}}({re.escape(PARTIAL)})?", each.name)]


def _given_up(address: Address) -> Path:
    return Path(address.path) / f"{GIVEN_UP}{address.token}"


def bucket_file(index: int) -> str:
    """The name of a whole bucket's file in a version's directory."""
    return f"bucket-{index:05d}.safetensors"


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.write_text(json.dumps(data))
    os.replace(temporary, path)


class DiskSender(Sender):
    """Writes each version, waits for the engines to read it, and removes older ones."""

    def __init__(self, address: Address, rank: int = 0) -> None:
        super().__init__(address, range(len(address.engines)))
        self._checksums: list[int] = []
        self._began = False
        self.partial = Path()  # directory of the update being written
        self.directory = Path()  # what it becomes

    def open(self) -> None:
        self._checksums, self._began = [], True
        self.directory = _directory(self.address.path, self.version)
        self.partial = self.directory.with_name(f"{self.directory.name}{PARTIAL}")
        try:
            for earlier in _directories(self.address.path):
                if earlier.name.endswith(PARTIAL):  # of a failed update or run
                    shutil.rmtree(earlier, ignore_errors=True)
            self.partial.mkdir(parents=True)
        except OSError as error:
            self.broken = f"cannot write {self.partial}: {error}"

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if self.broken:
            return
        flat = flat.detach().cpu().contiguous()  # the receiver computes the checksum of the file, on the host
        self._checksums.append(checksum(flat))
        try:
            self.transmit(bucket, flat)
        except Exception as error:  # OSError, or the safetensors library's own
            self.broken = f"cannot write {self.partial / bucket_file(bucket.index)}: {error}"

    def transmit(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Write one bucket's file into the directory `partial`."""
        self.write(bucket.index, flat, self.partial)

    def write(self, index: int, flat: torch.Tensor, directory: Path) -> None:
        """Write a whole bucket."""
        save_file({TENSOR: flat}, directory / bucket_file(index))

    def told(self) -> Mapping[str, Any]:
        """Additional content for manifest.json, besides checksums and error."""
        return {}

    def finish(self) -> None:
        """Publish the update, or why there is none. Engines may join from now on."""
        if self.broken:  # remove useless files: the disk may be full, and the error must still fit
            shutil.rmtree(self.partial, ignore_errors=True)
        try:
            try:
                self._publish()
            except OSError as error:
                self.broken = self.broken or f"cannot write {self.directory}: {error}"
                shutil.rmtree(self.partial, ignore_errors=True)
                self._publish()  # again, with just the error, which should fit now
        except OSError:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.drop_all(self.broken)
        self.joining = True

    def release(self) -> None:
        for other in _directories(self.address.path):
            if other != self.directory:
                shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        """Remove all versions, since the engines have loaded the last one. A rank that never sent removes nothing, as
        another rank may still be writing."""
        if not self._began:
            return
        for version in _directories(self.address.path):
            shutil.rmtree(version, ignore_errors=True)
        for file in Path(self.address.path).glob(f"{GIVEN_UP}*"):
            file.unlink(missing_ok=True)

    def listen(self, seconds: float) -> None:
        for index in self.awaited:
            said = _read(self.address.path, index)
            if said is None or (said.get("token"), said["version"]) != (self.address.token, self.version):
                continue
            asked = self.taking.get(index, {}).get("nonce") == said["nonce"]
            if said["is"] == "done" and asked:
                self.done(index, said["error"])
            elif said["is"] == "ask" and not asked:
                try:
                    self.asked(index, said)
                except Exception as error:  # OSError, or the safetensors library's own
                    self.drop(index, f"cannot admit {self.address.engines[index]} to {self.directory}: {error}")
        time.sleep(min(POLL_SECONDS, seconds))

    def answer(self, index: int, question: Mapping[str, Any], error: str) -> None:
        _write_json(self.directory / f"for-{question['nonce']}", {"error": error})

    def _publish(self) -> None:
        self.partial.mkdir(exist_ok=True)
        content = {"checksums": self._checksums, "error": self.broken, **self.told()}
        _write_json(self.partial / "manifest.json", content)
        if self.directory.exists():  # left by an earlier run that was killed
            shutil.rmtree(self.directory)
        os.replace(self.partial, self.directory)


class DiskReceiver(Receiver):
    """Reads each version when it is complete."""

    holds = ""  # the update whose bits it keeps, for a transport that needs it

    def __init__(self, address: Address, index: int) -> None:
        super().__init__(address, index)
        self._nonce = ""

    def say(self, what: str, version: int, **content: Any) -> None:
        if what == "ask":
            self._nonce = uuid.uuid4().hex
        who = {"token": self.address.token, "nonce": self._nonce, "holds": self.holds}
        path = Path(self.address.path) / f"engine-{self.index}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_json(path, {"is": what, "version": version, **who, **content})
        except OSError as failure:
            raise WeightUpdateError(f"cannot report to the trainer: {failure}") from failure

    def hear(self, version: int) -> Mapping[str, Any]:
        directory = _directory(self.address.path, version)
        deadline = time.monotonic() + self.patience  # the sender may be writing, too
        while not (directory / f"for-{self._nonce}").exists():
            if _given_up(self.address).exists():
                raise WeightUpdateError(f"{directory} was not written: its sender has ended")
            if time.monotonic() > deadline:
                raise WeightUpdateError(
                    f"{directory} was not written within {self.patience:g} s; raise cluster.timeout, or use a "
                    f"weights.transport other than {self.address.transport!r}"
                )
            time.sleep(POLL_SECONDS)
        answer: dict[str, Any] = json.loads((directory / f"for-{self._nonce}").read_text())
        return answer

    def receive(self, manifest: Manifest, version: int) -> Iterator[tuple[Bucket, torch.Tensor, int]]:
        directory = _directory(self.address.path, version)
        content = json.loads((directory / "manifest.json").read_text())
        if content["error"]:
            raise WeightUpdateError(f"the trainer could not send version {version}: {content['error']}")
        for bucket, sent in zip(manifest.buckets, content["checksums"], strict=True):
            yield bucket, self.read(bucket, directory, content), sent

    def read(self, bucket: Bucket, directory: Path, content: Mapping[str, Any]) -> torch.Tensor:
        """Read one bucket [bucket.numel] of the update in `directory`; `content` is its manifest.json."""
        path = directory / bucket_file(bucket.index)
        try:
            return load_file(path)[TENSOR]
        except Exception as error:  # OSError, or the safetensors library's own
            raise WeightUpdateError(f"cannot read {path}: {error}") from error

    def placed(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.to(self.address.device)

    def close(self) -> None:
        pass

    @staticmethod
    def give_up(address: Address) -> None:
        """Let receivers at this address wait no more: the sender has ended. Never raises: they may wait in vain."""
        with contextlib.suppress(OSError):
            Path(address.path).mkdir(parents=True, exist_ok=True)
            _given_up(address).touch()


def _read(path: str, index: int) -> dict[str, Any] | None:
    """What a receiver has said last; None if nothing."""
    try:
        said: dict[str, Any] = json.loads((Path(path) / f"engine-{index}.json").read_text())
    except (OSError, ValueError):  # missing so far, or replaced during the read, as happens on NFS
        return None
    return said
