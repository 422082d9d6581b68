"""Whether an engine may answer now: paused or running, and under which version of the weights, if any.

It starts without weights and serves a version once its update has committed. After an update that failed, or once its
weights slept, it serves nothing until another update commits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from corerl.errors import EngineFailed
from corerl.messages import message_of
from corerl.rollout.engine import Received
from corerl.rollout.receiving import Receiving
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import Address

if TYPE_CHECKING:
    import torch


INTERRUPT_SECONDS = 0.1  # between one interruption and the next


class Turns:
    """A lock that as many as `places` can hold at the same time, each by `one()`; or somebody alone."""

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
        """Whether nobody holds it, now or before so many seconds have passed."""
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


class Serving:
    """The part of an engine that does not depend on what generates. Its methods may be called from several threads."""

    def __init__(self, name: str, index: int, *, calls: int = 1) -> None:
        """`calls` of `generate` that may be inside `generating` side by side."""
        self._name = name
        self._version = -1  # of the last update that committed; the first one may be 0
        self._reason = "no weights have arrived yet"  # why nothing is served; "" while serving
        self._receiving = Receiving(index)
        self._paused = threading.Event()
        self._busy = Turns(calls)  # taken while generating; wholly, while weights change

    @contextmanager
    def generating(self) -> Iterator[int]:
        """Hold the weights still; gives their version. Raises EngineFailed without weights. Inside, ask before each
        token whether the engine is `paused`."""
        with self._busy.one():
            if self._reason:
                raise EngineFailed(f"{self._name} serves nothing: {self._reason}; update its weights first")
            yield self._version

    @property
    def paused(self) -> bool:
        """Whether no further token is to be drawn now."""
        return self._paused.is_set()

    def pause(self, interrupt: Callable[[], None] | None = None) -> None:
        """Returns when nothing is being generated any more. `interrupt` is for an engine whose tokens are drawn where
        nobody can ask whether it is `paused`: called as long as something is being generated, since a request may
        still be on its way there."""
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

        def transfer(refused: str) -> tuple[int, str]:
            return self._receiving.transfer(manifest, version, address, refused=refused, check=check, load=load)

        return self.update(version, transfer)

    def update(self, version: int, transfer: Callable[[str], tuple[int, str]]) -> Received:
        """The same for an engine whose weights arrive elsewhere: `transfer` is told why the update is refused ("" where
        it is not), and sees to it that they arrive and that the sender hears how it went. It gives the bytes that came,
        and what went wrong."""
        with self._busy:
            stale = version <= self._version
            refused = f"version {version} is not above {self._version}, which {self._name} holds" if stale else ""
            if not stale:
                self._reason = f"weights version {version} did not arrive whole"
            try:
                received, error = transfer(refused)
            except Exception as failure:
                received, error = 0, refused or message_of(failure)
            if not error:
                self._version, self._reason = version, ""
            elif not stale:
                self._reason = f"weights version {version} did not arrive whole ({error})"
            return Received(version=version, bytes=received, error=error)

    def close(self) -> None:
        with self._busy:
            self._reason = "it is closed"
            self._receiving.close()
