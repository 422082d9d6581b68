"""Track whether an engine may answer: paused or running, and under which weights version, if any.

An engine starts without weights and serves a version once its update has committed. After a failed update, or once its
weights slept, it serves nothing until another update commits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from corerl.engines.base import Received
from corerl.engines.receiving import Receiving
from corerl.errors import EngineFailed
from corerl.messages import message_of
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import Address

if TYPE_CHECKING:
    import torch


INTERRUPT_SECONDS = 0.1  # between two calls of `interrupt`


class SharedLock:
    """A lock held by up to `places` threads at once via `one()`, or exclusively via `with` on itself."""

    def __init__(self, places: int) -> None:
        self._places = self._free = places
        self._changed = threading.Condition()

    @contextmanager
    def one(self) -> Iterator[None]:
        self._take(1)
        try:
            yield
        finally:
            self._give(1)

    def __enter__(self) -> None:
        self._take(self._places)

    def __exit__(self, *exception: object) -> None:
        self._give(self._places)

    def empty(self, within: float) -> bool:
        """Wait up to `within` seconds; returns whether nobody holds it."""
        with self._changed:
            return self._changed.wait_for(lambda: self._free == self._places, within)

    def _take(self, places: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= places)
            self._free -= places

    def _give(self, places: int) -> None:
        with self._changed:
            self._free += places
            self._changed.notify_all()


class EngineLifecycle:
    """The part of an engine that is independent of how it generates. Thread-safe."""

    def __init__(self, name: str, index: int, *, calls: int = 1) -> None:
        """`calls`: how many threads may be inside `generating` at once."""
        self._name = name
        self._version = -1  # of the last committed update; the first may be 0
        self._reason = "no weights have arrived yet"  # why nothing is served; "" while serving
        self._receiving = Receiving(index)
        self._paused = threading.Event()
        self._busy = SharedLock(calls)  # shared while generating, exclusive while weights change

    @contextmanager
    def generating(self) -> Iterator[int]:
        """Hold the weights fixed and yield their version. Inside, check `paused` before each token. Raises EngineFailed
        without weights."""
        with self._busy.one():
            if self._reason:
                raise EngineFailed(f"{self._name} cannot generate: {self._reason}; update its weights first")
            yield self._version

    @property
    def paused(self) -> bool:
        """Whether to stop sampling tokens now."""
        return self._paused.is_set()

    def pause(self, interrupt: Callable[[], None] | None = None) -> None:
        """Returns when nothing is being generated. `interrupt` is for engines that cannot check `paused` while
        sampling: it is called repeatedly as long as anything is being generated, since a request may still be on its
        way to the sampler."""
        self._paused.set()
        while interrupt is not None and not self._busy.empty(within=0.0):
            interrupt()
            self._busy.empty(within=INTERRUPT_SECONDS)
        with self._busy:
            pass

    def resume(self) -> None:
        self._paused.clear()

    @contextmanager
    def dropping_weights(self, reason: str) -> Iterator[None]:
        """Hold the weights exclusively while they are dropped; nothing is served until the next update commits."""
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
        """Receive one weight update: `check` may refuse the manifest, `load` takes each bucket. Never raises.

        A version that is not above the current one changes nothing, and the engine keeps serving; after any other
        failure it serves nothing until a full update commits.
        """

        def transfer(refused: str) -> tuple[int, str]:
            return self._receiving.transfer(manifest, version, address, refused=refused, check=check, load=load)

        return self.update(version, transfer)

    def update(self, version: int, transfer: Callable[[str], tuple[int, str]]) -> Received:
        """Like `receive`, for an engine whose weights arrive elsewhere. `transfer` gets the reason of a refusal or "";
        it must receive the weights, report the outcome to the sender, and return the bytes received and the error."""
        with self._busy:
            stale = version <= self._version
            refused = (
                f"version {version} is not newer than {self._version}, which {self._name} already has" if stale else ""
            )
            if not stale:
                self._reason = f"the update to weights version {version} did not complete"
            try:
                received, error = transfer(refused)
            except Exception as failure:
                received, error = 0, refused or message_of(failure)
            if not error:
                self._version, self._reason = version, ""
            elif not stale:
                self._reason = f"the update to weights version {version} did not complete ({error})"
            return Received(version=version, bytes=received, error=error)

    def close(self) -> None:
        with self._busy:
            self._reason = "it has been closed"
            self._receiving.close()
