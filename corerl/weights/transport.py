"""How weights leave the trainer: a sender there and a receiver in each engine, connected by an address.

driver:   an Address, plain data, for both sides
trainer:  sender.begin(manifest, version); for each bucket gather into sender.acquire_buffer(...) and
          sender.send(bucket, flat); sender.commit()
engine:   for bucket, flat in receiver.buckets(manifest, version): load; then receiver.acknowledge(version, error)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from corerl.weights.manifest import Bucket, Manifest

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class Address:
    """Where and how one run's weights are sent; sending ranks and engines all get the same object."""

    transport: str  # its name
    engines: tuple[str, ...]  # receiver index -> engine name; an engine over several devices has several receivers
    host: str = ""  # collective: of the store where sender and receivers meet
    port: int = 0
    listening: int | None = None  # file descriptor, in rank 0's process, of a socket already listening there
    path: str = ""  # disk: directory with one subdirectory per version
    token: str = ""  # part of the names where sender and receivers meet, ipc's sockets and keys of collective's store
    senders: tuple[int, ...] = ()  # ipc: receiver index -> trainer rank on its device
    device: str = "cpu"  # of the buffers: cpu or cuda
    timeout: float = 600.0  # seconds that one side waits for the other
    options: Mapping[str, Any] = field(factory=dict)  # the transport's own table, as plain data


class WeightSender(ABC):
    """The trainer's end. A transport's own failure becomes an entry for its engines in `commit`, never an exception,
    because the gathering ranks must stay in step."""

    version: int = -1  # of the current or last update; set by `begin`
    sent: int | None = None  # bytes of this update, if the transport does not send buckets as they are

    def sender_of(self, bucket: Bucket) -> int | None:
        """The rank that this bucket is gathered on and sent from; None if that is every rank."""
        return 0

    @abstractmethod
    def begin(self, manifest: Manifest, version: int) -> None:
        """Called once per update, on every sending rank, before its first bucket."""

    def acquire_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory [numel] to gather the next bucket into, if the transport sends from its own memory; waits until that
        is free again. None: gather anywhere, since `send` is done with the bucket when it returns."""
        return None

    @abstractmethod
    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Send a full bucket [bucket.numel]; its memory is free on return, unless it is one of the sender's buffers."""

    @abstractmethod
    def commit(self) -> Mapping[str, str]:
        """Wait for the engines; returns engine name -> "" if it committed `self.version`, otherwise the reason."""

    def give_up(self, engine: str, version: int, reason: str) -> None:  # noqa: B027  -- a sender may never wait
        """Stop waiting for this engine in the update to `version`, because its process or its part has ended. Called
        from another thread before, during or after that update, possibly repeatedly. An answer that the engine has
        already given still counts."""

    @abstractmethod
    def close(self) -> None: ...
