"""Whether an engine may answer now: paused or running, and under which version of the weights, if any.

It starts without weights and serves a version once its update has committed. After an update that failed, or once its
weights slept, it serves nothing until another update commits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from corerl.errors import CorerlError, EngineFailed
from corerl.rollout.engine import Received
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import Address, WeightReceiver
from corerl.weights.transports import open_receiver

if TYPE_CHECKING:
    import torch


class Serving:
    """The part of an engine that does not depend on what generates. Its methods may be called from several threads."""

    def __init__(self, name: str, index: int) -> None:
        self._name = name
        self._index = index
        self._version = -1  # of the last update that committed; the first one may be 0
        self._reason = "no weights have arrived yet"  # why nothing is served; "" while serving
        self._receiver: WeightReceiver | None = None
        self._address: Address | None = None  # of the receiver
        self._open = threading.Event()
        self._open.set()
        self._busy = threading.Lock()  # held while generating and while weights change

    @contextmanager
    def generating(self) -> Iterator[int]:
        """Wait while paused, then hold the weights still; gives their version. Raises EngineFailed without weights."""
        while True:
            self._open.wait()
            with self._busy:
                if not self._open.is_set():
                    continue  # paused between the two lines above
                if self._reason:
                    raise EngineFailed(f"{self._name} serves nothing: {self._reason}; update its weights first")
                yield self._version
                return

    def pause(self) -> None:
        """Returns when nothing is being generated any more."""
        self._open.clear()
        with self._busy:
            pass

    def resume(self) -> None:
        self._open.set()

    @contextmanager
    def dropping_weights(self, reason: str) -> Iterator[None]:
        """Hold the weights while they are taken away: nothing is served until the next update commits."""
        with self._busy:
            self._reason = reason
            yield

    def receive(
        self,
        manifest: Manifest,
        version: int,
        address: Address,
        *,
        check: Callable[[Manifest], str],
        load: Callable[[Bucket, torch.Tensor], None],
    ) -> Received:
        """One weight update: `check` may refuse the manifest, `load` takes each bucket. Never raises.

        A version that is not above the current one changes nothing, and the engine goes on serving; after any other
        failure it serves nothing until a full update commits.
        """
        with self._busy:
            stale = version <= self._version
            if stale:
                error = f"version {version} is not above {self._version}, which {self._name} holds"
            else:
                error, self._reason = "", f"weights version {version} did not arrive whole"
            received = 0
            try:
                receiver = self._connect(address)
                try:
                    error = error or check(manifest)
                    for bucket, flat in receiver.buckets(manifest, version) if not error else ():
                        load(bucket, flat)
                        received += flat.numel() * flat.element_size()
                        del flat  # the sender takes its memory back once this is acknowledged
                except Exception as failure:  # whatever it is, the sender must hear of it
                    error = _line(failure)
                receiver.acknowledge(version, error)
            except Exception as failure:  # the connection itself; what was wrong before it weighs more
                error = error or _line(failure)
            if not error:
                self._version, self._reason = version, ""
            elif not stale:
                self._reason = f"weights version {version} did not arrive whole ({error})"
            return Received(version=version, bytes=received, error=error)

    def close(self) -> None:
        with self._busy:
            self._reason = "it is closed"
            self._disconnect()

    def _connect(self, address: Address) -> WeightReceiver:
        """The receiver of this address; a connection is kept for all updates that come through it."""
        if self._receiver is None or address != self._address:
            self._disconnect()
            self._receiver, self._address = open_receiver(address, index=self._index), address
        return self._receiver

    def _disconnect(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None


def _line(failure: Exception) -> str:
    return failure.message if isinstance(failure, CorerlError) else f"{type(failure).__name__}: {failure}"
