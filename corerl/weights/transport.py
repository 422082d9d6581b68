"""How buckets reach the engines: a sender on the trainer's side and a receiver in each engine, joined by an address.

driver:   an Address, plain data, for both sides
trainer:  sender.begin(manifest, version); for each bucket gather into sender.room(...), sender.send(bucket, flat);
          sender.commit()
engine:   for bucket, flat in receiver.buckets(manifest, version): load; then receiver.acknowledge(version, error)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from corerl.errors import WeightUpdateError
from corerl.weights.manifest import Bucket, Manifest

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class Address:
    """Where one run's weights travel; the same object is given to the sending ranks and to every engine."""

    transport: str  # ipc, collective, disk, delta
    engines: tuple[str, ...]  # of each receiver, by its index, its engine: one over several devices has several
    host: str = ""  # collective: of the store that sender and receivers meet at
    port: int = 0
    listening: int | None = None  # file descriptor in the root's process of a socket that listens there already
    path: str = ""  # disk, delta: directory that holds one directory a version
    token: str = ""  # ipc: part of the names of the sockets that sender and receivers meet at
    senders: tuple[int, ...] = ()  # ipc: of each receiver, by its index, the trainer's rank on its device
    device: str = "cpu"  # of the buffers: cpu or cuda
    timeout: float = 600.0  # seconds that one side waits for the other

    def by_engine(self, answers: Mapping[int, str]) -> dict[str, str]:
        """Receivers' answers, by index, as their engines': the first that says why not, "" where all have committed."""
        merged: dict[str, str] = {}
        for index, answer in answers.items():
            merged[self.engines[index]] = merged.get(self.engines[index]) or answer
        return merged

    def not_joined(self, version: int) -> str:
        return f"did not join the update to version {version} in {self.timeout:g} s"

    def not_committed(self, version: int, reason: str = "") -> str:
        return f"did not commit version {version}: {reason or f'no answer within {self.timeout:g} s'}"

    def other_tensors(self, index: int, version: int) -> str:
        return (
            f"{self.engines[index]} expects other tensors than the trainer sends for version {version} (their "
            "manifests differ): give both the manifest of this update"
        )


class WeightSender(ABC):
    """The trainer's end. A transport's own failure becomes an entry for its engines in `commit`, never an exception:
    the ranks that gather must stay in step."""

    version: int = -1  # of the update that goes on, or was the last; `begin` sets it
    sent: int | None = None  # bytes of this update, for a transport that does not send its buckets as they are

    def __init__(self) -> None:
        self._given_up: dict[str, tuple[int, str]] = {}  # by engine: of which version, and why

    @property
    def given_up(self) -> dict[str, str]:
        """Engines that this update does not wait for, each with why."""
        # A copy: `give_up` comes from another thread.
        return {name: reason for name, (version, reason) in dict(self._given_up).items() if version == self.version}

    def sender_of(self, bucket: Bucket) -> int | None:
        """The rank that must hold this bucket, and sends it, while others gather towards it; None where each does."""
        return 0

    @abstractmethod
    def begin(self, manifest: Manifest, version: int) -> None:
        """Called once a update, on every rank that sends, before its first bucket."""

    def room(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Where to gather the next bucket, [numel], for a transport that has memory of its own to send from, which is
        not free when `send` returns: this waits until it is. None: anywhere, since `send` has done with it."""
        return None

    @abstractmethod
    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Hand over a full bucket, [bucket.numel]; unless it lies in the sender's `room`, its memory is free again when
        this returns."""

    @abstractmethod
    def commit(self) -> Mapping[str, str]:
        """Wait for the engines; engine name -> "" where it committed `self.version`, else why it did not."""

    def give_up(self, engine: str, version: int, reason: str) -> None:
        """Stop waiting for this engine in the update to `version`: its process has ended, or it has. Called from
        another thread, before that update, while it goes on or too late, and perhaps several times; an answer that the
        engine has given still counts."""
        self._given_up[engine] = (version, reason)  # one assignment: no lock

    @abstractmethod
    def close(self) -> None: ...


class WeightReceiver(ABC):
    """An engine's end."""

    @abstractmethod
    def buckets(self, manifest: Manifest, version: int) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield each bucket in order, its checksum verified; its memory is used again for the next one.

        Raises WeightUpdateError where a bucket's checksum does not fit, or it does not arrive in time.
        """

    @abstractmethod
    def acknowledge(self, version: int, error: str) -> None:
        """Tell the sender how it went; "" means that this engine has committed `version`.

        Called once an update, whatever happened: after `buckets` ended or raised, or instead of it to refuse.
        Raises WeightUpdateError where the sender cannot be told.
        """

    @abstractmethod
    def close(self) -> None: ...


def require_undamaged(bucket: Bucket, version: int, *, got: int, sent: int) -> None:
    """Raises WeightUpdateError where the checksum of what came is another one than the sender's."""
    if got != sent:
        raise WeightUpdateError(
            f"bucket {bucket.index} of version {version} was damaged on its way: checksum {got:#x}, sent with "
            f"{sent:#x}; the update is refused"
        )
