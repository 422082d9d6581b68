"""Both ends of an update: engines in threads, and weights to send."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch

from corerl.engines.lifecycle import Receiving
from corerl.weights.manifest import Bucket, Manifest, build_manifest
from corerl.weights.transport import Address, GuardedSender, WeightSender
from tests.forks.client import ROOT, Forked

SHAPES: list[tuple[str, tuple[int, ...]]] = [("embed", (16, 6)), ("norm", (6,)), ("layers.0.q", (8, 6)), ("scale", ())]
MANIFEST = build_manifest(SHAPES, dtype="float32", bucket_bytes=200)  # three buckets
# More than sockets hold on their way, so that a sender notices what has become of its peers.
LARGE = build_manifest([(f"{index}", (2**20,)) for index in range(16)], dtype="float32", bucket_bytes=2**22)

Weights = Mapping[str, torch.Tensor]
Load = Callable[[Bucket, torch.Tensor], None]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def address_of(transport: str, *engines: str, path: Path = Path(), **parts: Any) -> Address:
    given: dict[str, Any] = {
        "timeout": 20.0,
        "colocated_ranks": (0,) * len(engines),
        "host": "127.0.0.1",
        "port": free_port(),
        **parts,
    }
    return Address(transport=transport, engines=engines, path=str(path), token=uuid.uuid4().hex, **given)


def weights(seed: int, dtype: str = "float32") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for name, shape in SHAPES}


def same(loaded: Weights, sent: Weights) -> bool:
    return loaded.keys() == sent.keys() and all(torch.equal(loaded[name], sent[name]) for name in sent)


class Engine:
    """Receives in a thread of its own; `loaded` holds copies of the tensors of the last update."""

    def __init__(self, index: int = 0) -> None:
        self._receiving = Receiving(index)
        self._thread = ThreadPoolExecutor(1)
        self.loaded: dict[str, torch.Tensor] = {}

    def take(self, address: Address, version: int, manifest: Manifest = MANIFEST, load: Load | None = None) -> Any:
        """A future of the bytes received."""
        self.loaded = {}
        received: Future[int] = self._thread.submit(
            self._receiving.transfer, manifest, version, address, load=load or self._load
        )
        return received

    def _load(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.loaded |= {name: tensor.clone() for name, tensor in bucket.views(flat).items()}

    def close(self) -> None:
        self._thread.submit(self._receiving.close).result()
        self._thread.shutdown()


@contextlib.contextmanager
def peer(address: Address, index: int, size: str, *acts: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """An engine in a process of its own, see peer.py; yields a function that reads its next line."""
    argv = [str(Path(__file__).with_name("peer.py")), json.dumps(attrs.asdict(address)), str(index), size, *acts]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ours, theirs = os.pipe()
    process: Forked | subprocess.Popen[bytes]
    with open(theirs, "wb") as stdout, open(os.devnull, "w+b") as nothing:
        files: dict[str, Any] = {"stdin": nothing, "stdout": stdout, "stderr": nothing}
        if torch.cuda.is_available():  # which may be in use where processes are forked
            process = subprocess.Popen([sys.executable, *argv], env=environment, **files)
        else:
            code = "from tests.weights.peer import main; main()"
            process = Forked(argv, code, environment=environment, **files)
    with open(ours) as answers:
        try:
            yield lambda: json.loads(answers.readline())
        finally:
            process.kill()
            process.wait()


def push(
    sender: WeightSender,
    address: Address,
    tensors: Weights,
    version: int,
    *,
    manifest: Manifest = MANIFEST,
    rank: int = 0,
) -> dict[str, str]:
    """Send as a backend does; returns engine -> why it lacks buckets."""
    sending = GuardedSender(sender, verify=False)
    sending.open(manifest, version)
    for bucket in manifest.buckets:
        if sending.sending_rank(bucket) in (None, rank):
            flat = torch.cat([tensors[entry.name].reshape(-1) for entry in bucket.entries])
            room = sending.acquire_buffer(flat.numel(), flat.dtype)
            sending.send(bucket, flat if room is None else room.copy_(flat))
    return dict(sending.finish())


def no_room(bucket: Bucket, flat: torch.Tensor) -> None:
    raise MemoryError("no room for it")
