"""Send buckets through a shared directory: one subdirectory per version, published by one rename, in safetensors.

    PATH/v00000007/bucket-00000.safetensors   one flat tensor, `bucket`
    PATH/v00000007/manifest.json              digest, checksum of each bucket; or the sender's error
    PATH/v00000007/for-NONCE                  admits the receiver that asked with this nonce: it may read
    PATH/given-up-TOKEN                       ends the wait of receivers at the address with this token
    PATH/engine-0.json                        receiver 0's state: version, nonce, whether it waits or is done, its
                                              error, and, if relevant, which update it holds

The nonce distinguishes this update from one of the same version left behind by an earlier run: an engine asks with a
fresh nonce, the sender admits it, and only then does the engine read or refuse. An answer with a nonce that was not
admitted does not belong to this update.
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
from corerl.weights.checksum import checksum
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import Address, WeightReceiver, WeightSender, require_undamaged

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


def give_up(address: Address) -> None:
    """Let receivers at this address wait no more: the sender has ended. Never raises: they may wait in vain."""
    with contextlib.suppress(OSError):
        Path(address.path).mkdir(parents=True, exist_ok=True)
        _given_up(address).touch()


def bucket_file(index: int) -> str:
    return f"bucket-{index:05d}.safetensors"


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.write_text(json.dumps(data))
    os.replace(temporary, path)


class DiskSender(WeightSender):
    """Writes each version, waits for the engines to read it, and removes older ones."""

    def __init__(self, address: Address) -> None:
        super().__init__()
        self._address = address
        self._digest = ""
        self._checksums: list[int] = []
        self._began = False
        self._partial = Path()  # directory of the update being written
        self._error = ""  # why this update cannot be written

    def begin(self, manifest: Manifest, version: int) -> None:
        self.version = version
        self._error, self._checksums, self._digest, self._began = "", [], manifest.digest, True
        directory = _directory(self._address.path, version)
        self._partial = directory.with_name(f"{directory.name}{PARTIAL}")
        try:
            for earlier in _directories(self._address.path):
                if earlier.name.endswith(PARTIAL):  # of a failed update or run
                    shutil.rmtree(earlier, ignore_errors=True)
            self._partial.mkdir(parents=True)
        except OSError as error:
            self._error = f"cannot write {self._partial}: {error}"

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if self._error:
            return
        flat = flat.detach().cpu().contiguous()  # the receiver computes the checksum of the file, on the host
        self._checksums.append(checksum(flat))
        try:
            self.transmit(bucket, flat)
        except Exception as error:  # OSError, or the safetensors library's own
            self._error = f"cannot write {self._partial / bucket_file(bucket.index)}: {error}"

    def transmit(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Write one bucket's file."""
        save_file({TENSOR: flat}, self._partial / bucket_file(bucket.index))

    def told(self) -> Mapping[str, Any]:
        """Additional content for manifest.json, besides digest, checksums and error."""
        return {}

    def admit(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Allow the receiver that asked with this state to read."""
        (directory / f"for-{state['nonce']}").touch()

    def commit(self) -> Mapping[str, str]:
        directory = _directory(self._address.path, self.version)
        if self._error:  # remove useless files: the disk may be full, and the error must still fit
            shutil.rmtree(self._partial, ignore_errors=True)
        try:
            try:
                self._publish(directory)
            except OSError as error:
                self._error = self._error or f"cannot write {directory}: {error}"
                shutil.rmtree(self._partial, ignore_errors=True)
                self._publish(directory)  # again, with just the error, which should fit now
        except OSError:
            shutil.rmtree(self._partial, ignore_errors=True)
            return dict.fromkeys(self._address.engines, self._error)
        answers = self._wait_for_engines(directory)
        for other in _directories(self._address.path):
            if other != directory:
                shutil.rmtree(other, ignore_errors=True)
        return answers

    def close(self) -> None:
        """Remove all versions, since the engines have loaded the last one. A rank that never sent removes nothing, as
        another rank may still be writing."""
        if not self._began:
            return
        for version in _directories(self._address.path):
            shutil.rmtree(version, ignore_errors=True)
        for file in Path(self._address.path).glob(f"{GIVEN_UP}*"):
            file.unlink(missing_ok=True)

    def _publish(self, directory: Path) -> None:
        self._partial.mkdir(exist_ok=True)
        content = {"digest": self._digest, "checksums": self._checksums, "error": self._error, **self.told()}
        _write_json(self._partial / "manifest.json", content)
        if directory.exists():  # left by an earlier run that was killed
            shutil.rmtree(directory)
        os.replace(self._partial, directory)

    def _wait_for_engines(self, directory: Path) -> dict[str, str]:
        answers: dict[int, str] = {}  # by receiver
        admitted: set[str] = set()
        deadline = time.monotonic() + self._address.timeout
        while len(answers) < len(self._address.engines) and time.monotonic() < deadline:
            for index, name in enumerate(self._address.engines):
                if index in answers:
                    continue
                if name in self.given_up:
                    answers[index] = self._address.not_committed(self.version, self.given_up[name])
                state = _read_state(self._address.path, index)
                if state is None or state["version"] != self.version:
                    continue
                if state["done"]:
                    if state["nonce"] in admitted:
                        answers[index] = state["error"]
                elif state["nonce"] not in admitted:
                    try:
                        self.admit(directory, state)
                        admitted.add(state["nonce"])
                    except Exception as error:  # OSError, or the safetensors library's own
                        answers[index] = f"cannot admit {name} to {directory}: {error}"
            time.sleep(POLL_SECONDS)
        late = self._address.not_committed(self.version)
        return self._address.by_engine({i: answers.get(i, late) for i in range(len(self._address.engines))})


class DiskReceiver(WeightReceiver):
    holds = ""  # the update whose bits it keeps, for a transport that needs it

    def __init__(self, address: Address, index: int) -> None:
        self._address = address
        self._index = index
        self._nonce = ""

    def buckets(self, manifest: Manifest, version: int) -> Iterator[tuple[Bucket, torch.Tensor]]:
        directory = self._ask(version)
        content = json.loads((directory / "manifest.json").read_text())
        if content["error"]:
            raise WeightUpdateError(f"the trainer could not send version {version}: {content['error']}")
        if content["digest"] != manifest.digest:
            raise WeightUpdateError(
                f"{directory} contains different tensors from those of version {version} (the manifests differ); give "
                "trainer and engine the manifest of this update"
            )
        for bucket, sent in zip(manifest.buckets, content["checksums"], strict=True):
            flat = self.read(bucket, directory, content)
            got = checksum(flat)
            require_undamaged(bucket, version, got=got, sent=sent)
            yield bucket, flat.to(self._address.device)

    def acknowledge(self, version: int, error: str) -> None:
        try:
            if not self._nonce:  # refused before reading: the sender only accepts answers it has admitted
                self._ask(version)
            self._tell(version, done=True, error=error)
        finally:
            self._nonce = ""

    def close(self) -> None:
        pass

    def read(self, bucket: Bucket, directory: Path, content: Mapping[str, Any]) -> torch.Tensor:
        """Read one bucket [bucket.numel] of the update in `directory`; `content` is its manifest.json."""
        path = directory / bucket_file(bucket.index)
        try:
            return load_file(path)[TENSOR]
        except Exception as error:  # OSError, or the safetensors library's own
            raise WeightUpdateError(f"cannot read {path}: {error}") from error

    def _ask(self, version: int) -> Path:
        """Wait until the sender has written `version` and admitted this engine; returns the directory."""
        self._nonce = uuid.uuid4().hex
        directory = _directory(self._address.path, version)
        self._tell(version, done=False, error="")
        seconds = 2 * self._address.timeout  # the sender may be writing, or waiting for another engine
        deadline = time.monotonic() + seconds
        while not (directory / f"for-{self._nonce}").exists():
            if _given_up(self._address).exists():
                raise WeightUpdateError(f"{directory} was not written: its sender has ended")
            if time.monotonic() > deadline:
                raise WeightUpdateError(
                    f"{directory} was not written within {seconds:g} s; raise cluster.timeout, or use a "
                    f"weights.transport other than {self._address.transport!r}"
                )
            time.sleep(POLL_SECONDS)
        return directory

    def _tell(self, version: int, *, done: bool, error: str) -> None:
        state = {"version": version, "nonce": self._nonce, "done": done, "error": error, "holds": self.holds}
        path = Path(self._address.path) / f"engine-{self._index}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_json(path, state)
        except OSError as failure:
            raise WeightUpdateError(f"cannot report to the trainer: {failure}") from failure


def _read_state(path: str, index: int) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = json.loads((Path(path) / f"engine-{index}.json").read_text())
    except (OSError, ValueError):  # missing so far, or replaced during the read, as happens on NFS
        return None
    return state
