"""Track in an engine's process whether it may answer: paused or running, and under which weights version, if any. The
process itself is started, watched and replaced by `engines.fleet`.

An engine starts without weights and serves a version once its update has committed. After a failed update, or once its
weights slept, it serves nothing until another update commits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, TypeAlias

from corerl.engines.base import Received
from corerl.errors import EngineFailed, WeightUpdateError
from corerl.messages import message_of
from corerl.plugin.transports import open_receiver
from corerl.weights.adapters import is_adapter
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import Address, Receiver

if TYPE_CHECKING:
    import torch

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

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

    def __init__(self, name: str, index: int, *, calls: int = 1, versions: int = 1) -> None:
        """`calls`: how many threads may be inside `generating` at once; `versions`: how many versions of adapters the
        engine holds, which keeps those in `held` alone."""
        self._name, self._versions = name, versions
        self._version = -1  # of the last committed update; the first may be 0
        self.held: tuple[int, ...] = ()  # versions that can be sampled from, the newest last
        self._reason = "no weights have arrived yet"  # why nothing is served; "" while serving
        self.holds_weights = False  # all of them, so that adapters may arrive alone
        self._receiving = Receiving(index)
        self._paused = threading.Event()
        self._busy = SharedLock(calls)  # shared while generating, exclusive while weights change

    @contextmanager
    def generating(self, version: int | None = None) -> Iterator[int]:
        """Hold the weights fixed and yield their version, which is `version` unless that is None. Inside, check
        `paused` before each token. Raises EngineFailed without weights, or without those of this version."""
        with self._busy.one():
            if self._reason:
                raise EngineFailed(f"{self._name} cannot generate: {self._reason}; update its weights first")
            if version not in (None, *self.held):
                held = ", ".join(map(str, self.held))
                raise EngineFailed(f"{self._name} cannot sample from weights version {version}: it holds {held}")
            yield self._version if version is None else version

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
            self._reason, self.holds_weights, self.held = reason, False, ()
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

        def transfer() -> int:
            if refused := check(manifest):
                raise WeightUpdateError(refused)
            return self._receiving.transfer(manifest, version, address, load=load)

        return self.update(version, transfer, alone=all(map(is_adapter, manifest.names)))

    def forget(self, version: int) -> None:
        """Hold an earlier version no longer."""
        self.held = tuple(each for each in self.held if each != version)

    def update(self, version: int, transfer: Callable[[], int], *, alone: bool = False) -> Received:
        """Like `receive`, for an engine whose weights arrive elsewhere: `transfer` receives them and returns bytes, or
        raises. Earlier versions stay in `held` only where adapters have arrived `alone`, for the same weights."""
        with self._busy:
            if version <= self._version:
                stale = f"version {version} is not newer than {self._version}, which {self._name} already has"
                return Received(bytes=0, error=stale)
            self._reason = f"the update to weights version {version} did not complete"
            try:
                received = transfer()
            except Exception as failure:
                error = message_of(failure)
                self._reason += f" ({error})"
                self.holds_weights, self.held = False, ()
                return Received(bytes=0, error=error, details=getattr(failure, "details", ""))
            self._version, self._reason, self.holds_weights = version, "", True
            self.held = (*(self.held if alone else ()), version)[-self._versions :]
            return Received(bytes=received, held=self.held)

    def close(self) -> None:
        with self._busy:
            self._reason = "it has been closed"
            self._receiving.close()


class Receiving:
    """Receives weight updates on one device, keeping the connection while the address stays the same."""

    def __init__(self, index: int) -> None:
        self._index = index  # among the receivers of all engines
        self._receiver: Receiver | None = None
        self._address: Address | None = None

    def transfer(
        self,
        manifest: Manifest,
        version: int,
        address: Address,
        *,
        load: Callable[[Bucket, torch.Tensor], None],
    ) -> int:
        """Receive one update; returns bytes. Raises WeightUpdateError if a bucket does not arrive or `load` fails;
        then the sender notices that this receiver takes no more."""
        if self._receiver is None or address != self._address:
            self.close()
            self._receiver, self._address = open_receiver(address, index=self._index), address
        received, failed = 0, ""
        with closing(self._receiver.buckets(manifest, version)) as arriving:
            for bucket, flat in arriving:
                try:
                    load(bucket, flat)
                    received += flat.nbytes
                except Exception as failure:  # let go of, as its frames hold the sender's memory
                    failed = message_of(failure)
                    break
                finally:
                    del flat
        if failed:
            raise WeightUpdateError(failed)
        return received

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None


def shape_mismatch(offered: Shapes, held: Shapes, *, whole: bool = False) -> str:
    """Why `offered` cannot be loaded into a model that holds `held`, both by HF name; "" if it can. If adapters are
    among them, these may arrive alone once the engine holds all else, as `whole` says."""
    alone = bool(offered) and all(map(is_adapter, offered))
    if alone and not whole:
        return "adapters have arrived alone, but the engine lacks the weights that they adapt; send all weights first"
    wanted = {name: shape for name, shape in held.items() if is_adapter(name) or not alone}
    if missing := sorted(wanted.keys() - offered.keys()):
        return f"the trainer does not send {len(missing)} of the model's {len(wanted)} tensors, such as {missing[0]!r}"
    if unknown := sorted(offered.keys() - wanted.keys()):
        return f"the model lacks {len(unknown)} of the {len(offered)} tensors that were sent, such as {unknown[0]!r}"
    for name, shape in offered.items():
        if tuple(shape) != wanted[name]:
            return f"the trainer sends {name!r} with shape {list(shape)}, but the model requires {list(wanted[name])}"
    return ""
