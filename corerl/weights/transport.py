"""How weights leave the trainer: a sender on each rank, a receiver for each device of each engine, and an `Address`.

The driver controls an update, and the transport carries its data:

    driver    starts `TrainGroup.update_weights` and `Engine.receive` at once, both with the same Address; their results
              say how the update ended; meanwhile it reports failed engines to the ranks (`TrainGroup.engine_failed`)
    rank      sender.open(manifest, version); for each bucket gather into sender.acquire_buffer(...) and
              sender.send(bucket, flat); sender.finish()
    engine    for bucket, flat in receiver.buckets(manifest, version): load

All receivers of an Address take part. If one fails, the driver replaces its engine and sends again, at a new Address.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from attrs import field, frozen

from corerl.errors import WeightUpdateError
from corerl.messages import message_of
from corerl.weights.manifest import Bucket, Manifest

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Each bucket, its buffer [bucket.numel], and the checksum that it was sent with.
Arriving: TypeAlias = "Generator[tuple[Bucket, torch.Tensor, int], None, None]"


@frozen(kw_only=True)
class Address:
    """Where and how weights are sent; sending ranks and engines all get the same object."""

    transport: str  # its name
    engines: tuple[str, ...]  # receiver index -> engine name; an engine over several devices has several receivers
    host: str = ""  # collective: of the store where sender and receivers meet
    port: int = 0
    listen_fd: int | None = None  # file descriptor, in rank 0's process, of a socket already listening there
    path: str = ""  # of files: directory with one subdirectory per version
    token: str = ""  # part of the names where sender and receivers meet: sockets, keys of a store, directories
    colocated_ranks: tuple[int, ...] = ()  # ipc: receiver index -> trainer rank on its device
    device: str = "cpu"  # of the buffers: cpu or cuda
    timeout: float = 600.0  # seconds that a sender waits for a receiver
    options: Mapping[str, Any] = field(factory=dict)  # the transport's own table, as plain data


class WeightSender(ABC):
    """A trainer rank's end, which `backend.stream.WeightStream.update_weights` calls. Its methods raise if they cannot
    go on: `GuardedSender` reports that and keeps the ranks in step."""

    bytes_sent: int | None = None  # bytes of this update, if the transport does not send buckets as they are

    def __init__(self, address: Address, rank: int = 0, lost: Mapping[str, str] | None = None) -> None:
        """`lost`: engine -> why it has failed, of those that take no more part. It grows while a method waits, in
        another thread."""
        self.address = address
        self.rank = rank
        self.lost: Mapping[str, str] = {} if lost is None else lost

    def sending_rank(self, bucket: Bucket) -> int | None:
        """The rank that this bucket is gathered on and sent from; None if that is every rank."""
        return 0

    @abstractmethod
    def open(self, manifest: Manifest, version: int) -> None:
        """Called once per update, on every sending rank, before its first bucket."""

    def acquire_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory [numel] to gather the next bucket into, if the transport sends from its own memory; waits until that
        is free again. None: gather anywhere, since `send` is done with the bucket when it returns."""
        return None

    @abstractmethod
    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Send a full bucket [bucket.numel]; its memory is free on return, unless it is one of the sender's buffers."""

    @abstractmethod
    def finish(self) -> Mapping[str, str]:
        """Wait until all buckets have arrived; returns engine -> why it lacks some. No entry, or "": it has all."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Receivers that still wait for buckets should notice."""


class GuardedSender(WeightSender):
    """What a backend sends to: one update of one rank. It passes all to the transport's sender until that fails; then
    it closes that, so that receivers notice, goes on without sending, and `finish` says why for every engine."""

    def __init__(self, sender: WeightSender, *, verify: bool) -> None:
        """With `verify`, sum what this rank sends; if all ranks send the same, only rank 0 sums."""
        super().__init__(sender.address, sender.rank)
        self._sender = sender
        self._verify = verify
        self.sums: dict[str, int] = {}
        self.error = ""  # why this rank can no longer send this update

    def sending_rank(self, bucket: Bucket) -> int | None:
        return self._sender.sending_rank(bucket)

    def open(self, manifest: Manifest, version: int) -> None:
        self._try(lambda: self._sender.open(manifest, version))

    def acquire_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        return self._try(lambda: self._sender.acquire_buffer(numel, dtype))

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if self._verify and (self.sending_rank(bucket) or 0) == self.rank:
            from corerl.weights.checksums import bit_sums  # needs torch, which a driver does not

            self.sums |= bit_sums(bucket.views(flat))  # before sending: afterwards the transport may reuse the memory
        self._try(lambda: self._sender.send(bucket, flat))

    def finish(self) -> Mapping[str, str]:
        missed = self._try(self._sender.finish)
        self.bytes_sent = self._sender.bytes_sent
        return dict.fromkeys(self.address.engines, self.error) if missed is None else missed

    def close(self) -> None:
        self._sender.close()

    def _try(self, call: Callable[[], T]) -> T | None:
        if self.error:
            return None
        try:
            return call()
        except Exception as error:
            self.error = f"the trainer could not send the weights: {message_of(error)}"
            self.close()
            return None


class Receiver(ABC):
    """An engine's end: for one of its devices."""

    def __init__(self, address: Address, index: int) -> None:
        self.address = address
        self.index = index

    def buckets(self, manifest: Manifest, version: int) -> Generator[tuple[Bucket, torch.Tensor], None, None]:
        """Yield each bucket in order, its checksum verified. Its memory is reused for later ones. Close the iterator if
        you stop early.

        Raises WeightUpdateError if a checksum does not match, or a bucket does not arrive.
        """
        from corerl.weights.checksums import checksum  # needs torch, which a driver does not

        with closing(self.receive(manifest, version)) as arriving:
            for bucket, flat, sent in arriving:
                if (got := checksum(flat)) != sent:
                    raise WeightUpdateError(
                        f"bucket {bucket.index} of version {version} was damaged in transit: its checksum is {got:#x}, "
                        f"but {sent:#x} was sent; the update is rejected"
                    )
                try:
                    yield bucket, self.placed(flat)
                finally:
                    del flat  # its memory goes back to the sender

    @property
    def patience(self) -> float:
        """Seconds to wait for the sender, which may be waiting for another engine."""
        return 2 * self.address.timeout

    @abstractmethod
    def receive(self, manifest: Manifest, version: int) -> Arriving:
        """Yield each bucket in order, with the checksum that it was sent with. Its memory may be reused when the next
        one is asked for. Closed early if this engine has failed: give back what the update took, and let the sender and
        other receivers go on."""

    def placed(self, flat: torch.Tensor) -> torch.Tensor:
        """A received bucket on the engine's device."""
        return flat

    @abstractmethod
    def close(self) -> None:
        """Free everything; called after a failed update too. A sender that still waits should notice."""
