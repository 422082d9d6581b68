"""The protocol of an update, the same over every transport: who takes part, and how it ended for each engine.

    receiver -> sender   ask: its manifest's digest, and what the transport wants to know of it; or why it takes no part
    sender -> receiver   go, and what the transport has to tell it; or why it is left out
    receiver -> sender   done: "" if it has committed, otherwise why not

The sender waits for the receivers' questions, and in the end until all that take part are done, each time for up to the
address's timeout; for an engine that is given up or lost, no longer. It goes on with the others, and what it no longer
waits for is an entry in `commit`. A receiver waits twice as long, since the sender may be waiting for another engine.

Transports say how these messages travel (`listen`, `answer`; `say`, `hear`) and how bytes do (`open`, `send`, `finish`;
`receive`, `leave`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from corerl.errors import WeightUpdateError
from corerl.messages import first_line
from corerl.weights.checksums import checksum
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import Address, WeightSender

LOOK_SECONDS = 0.25  # between checks of what another thread has reported


class Sender(WeightSender):
    """The trainer's end."""

    manifest: Manifest  # of this update

    def __init__(self, address: Address, receivers: Iterable[int]) -> None:
        """`receivers`: the indices of those that this rank meets."""
        self.address = address
        self.receivers = tuple(receivers)
        self.taking: dict[int, Mapping[str, Any]] = {}  # who takes part and is not done -> what it has asked with
        self.answers: dict[int, str] = {}  # who is done or left out -> "" if it committed, otherwise why not
        self.joining = False  # whether receivers may still join
        self.broken = ""  # why this rank can no longer send this update
        self._given_up: dict[str, tuple[int, str]] = {}  # engine -> (version, reason)

    # ---- called by backends ------------------------------------------------------------------------------------------

    def begin(self, manifest: Manifest, version: int) -> None:
        self.manifest, self.version = manifest, version
        self.taking, self.answers, self.broken = {}, {}, ""
        self.open()

    def commit(self) -> Mapping[str, str]:
        self.finish()
        self.wait(lambda: not self.awaited, self.patience)
        self.joining = False
        self.drop_all(self._not_committed(self.broken or f"no answer within {self.address.timeout:g} s"))
        self.release()
        engines: dict[str, str] = {}
        for index in self.receivers:
            name = self.address.engines[index]
            engines[name] = engines.get(name) or self.answers[index]  # of an engine's receivers, the first error
        return engines

    def give_up(self, engine: str, version: int, reason: str) -> None:
        self._given_up[engine] = (version, reason)  # a single assignment needs no lock

    # ---- called by transports ----------------------------------------------------------------------------------------

    @property
    def awaited(self) -> list[int]:
        """Receivers that may still be heard of in this update."""
        return [each for each in self.receivers if each not in self.answers and (self.joining or each in self.taking)]

    @property
    def given_up(self) -> dict[str, str]:
        """Engines that this update no longer waits for -> why."""
        # A copy: `give_up` comes from another thread.
        return {name: reason for name, (version, reason) in dict(self._given_up).items() if version == self.version}

    def meet(self) -> None:
        """Let receivers join, until all have asked or the time is up."""
        self.joining = True
        try:
            self.wait(lambda: self.taking.keys() >= set(self.awaited), self.address.timeout)
        finally:
            self.joining = False
        late = f"did not join the update to version {self.version} within {self.address.timeout:g} s"
        self.drop_all(late, but=self.taking)

    def wait(self, until: Callable[[], bool], seconds: float) -> None:
        """Listen until `until` holds or the time is up."""
        deadline = time.monotonic() + seconds
        while not until() and (left := deadline - time.monotonic()) > 0:
            self.listen(min(LOOK_SECONDS, left))
            for index in self.awaited:
                if (reason := self.given_up.get(self.address.engines[index])) is not None:
                    self.drop(index, self._not_committed(reason) if index in self.taking else reason)

    def asked(self, index: int, question: Mapping[str, Any]) -> None:
        """A receiver has asked to take part, or says why it does not."""
        version, refusal = question["version"], ""
        if version != self.version:
            refusal = f"the trainer is sending version {self.version}, not {version}"
        elif not self.joining:
            refusal = f"version {version} is already being sent without this engine"
        elif question["error"]:
            self.answers[index] = question["error"]
            return
        elif question["digest"] != self.manifest.digest:
            refusal = (
                f"{self.address.engines[index]} expects different tensors from those the trainer sends for version "
                f"{version} (the manifests differ); give both the manifest of this update"
            )
        if not refusal:
            self.taking[index] = question
            self.admit(index)
            return
        if version == self.version:
            self.answers.setdefault(index, refusal)
        self.answer(index, question, refusal)

    def done(self, index: int, error: str) -> None:
        """A receiver that takes part is done."""
        self.taking.pop(index, None)
        self.answers.setdefault(index, error)

    def drop(self, index: int, reason: str) -> None:
        """Wait no more for a receiver."""
        self.done(index, reason)
        self.left_out(index, reason)

    def drop_all(self, reason: str, *, but: Collection[int] = ()) -> None:
        """Wait no more for any that is neither done nor left out."""
        for index in self.receivers:
            if index not in self.answers and index not in but:
                self.drop(index, reason)

    def _not_committed(self, reason: str) -> str:
        return f"did not commit version {self.version}: {reason}"

    # ---- of each transport -------------------------------------------------------------------------------------------

    @property
    def patience(self) -> float:
        """Seconds to wait, after the last bucket, until all are done."""
        return self.address.timeout

    @abstractmethod
    def open(self) -> None:
        """Get ready to send `manifest` as `version`; calls `meet` if buckets are for those that have joined by then. A
        failure becomes the reason of those whom it concerns (`drop`, `broken`)."""

    @abstractmethod
    def listen(self, seconds: float) -> None:
        """Wait up to `seconds` for messages; calls `asked`, `done` or `drop` for each."""

    @abstractmethod
    def answer(self, index: int, question: Mapping[str, Any], error: str) -> None:
        """Let a receiver go on that has asked this; or with an `error`, tell it why it is left out."""

    def admit(self, index: int) -> None:
        """A receiver now takes part."""
        self.answer(index, self.taking[index], "")

    def left_out(self, index: int, reason: str) -> None:
        """A receiver is no longer waited for."""

    @abstractmethod
    def finish(self) -> None:
        """Have all buckets on their way; called once after the last one."""

    def release(self) -> None:
        """Give back what the update took; nobody reads any more."""


class Receiver(ABC):
    """An engine's end."""

    def __init__(self, address: Address, index: int) -> None:
        self.address = address
        self.index = index
        self._asked: int | None = None  # the version that it has asked to join
        self._joined: int | None = None  # the version that it has joined

    # ---- called by engines -------------------------------------------------------------------------------------------

    def buckets(self, manifest: Manifest, version: int) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield each bucket in order, its checksum verified. Its memory is reused for later ones.

        Raises WeightUpdateError if a checksum does not match, or a bucket does not arrive in time.
        """
        self.prepare(manifest)  # if this fails, the engine is left out, and nobody waits for it
        self._asked = version
        try:
            self.say("ask", version, digest=manifest.digest, error="")
            answer = self.hear(version)
            if answer["error"]:
                raise WeightUpdateError(answer["error"])
            self._joined = version
            self.join(manifest, answer)
        except WeightUpdateError:
            raise
        except Exception as error:
            raise WeightUpdateError(f"cannot join the update to version {version}: {first_line(error)}") from error
        for bucket, flat, sent in self.receive(manifest, version):
            if (got := checksum(flat)) != sent:
                raise WeightUpdateError(
                    f"bucket {bucket.index} of version {version} was damaged in transit: its checksum is {got:#x}, but "
                    f"{sent:#x} was sent; the update is rejected"
                )
            yield bucket, self.placed(flat)
            del flat  # its memory goes back to the sender

    def acknowledge(self, version: int, error: str) -> None:
        """Report the outcome to the sender; "" means that this engine has committed `version`.

        Called once per update, whatever happened: after `buckets` ended or raised, or instead of it to refuse.
        Raises WeightUpdateError if the sender cannot be reached.
        """
        asked, joined = self._asked == version, self._joined == version
        self._asked = self._joined = None
        outcome = self.leave(version, error, joined=joined)
        if joined:
            self.say("done", version, **outcome)
        elif not asked:  # otherwise the sender itself has left this engine out
            self.say("ask", version, digest="", error=error or "did not read the update")

    @abstractmethod
    def close(self) -> None: ...

    @property
    def patience(self) -> float:
        """Seconds to wait for the sender, which may be waiting for another engine."""
        return 2 * self.address.timeout

    # ---- of each transport -------------------------------------------------------------------------------------------

    def prepare(self, manifest: Manifest) -> None:  # noqa: B027  -- most take nothing
        """Take what an update needs, before anybody relies on this engine."""

    @abstractmethod
    def say(self, what: str, version: int, **content: Any) -> None:
        """Send a message, "ask" or "done". Raises WeightUpdateError if the sender cannot be reached."""

    @abstractmethod
    def hear(self, version: int) -> Mapping[str, Any]:
        """Wait for the answer. Raises WeightUpdateError if none comes."""

    def join(self, manifest: Manifest, answer: Mapping[str, Any]) -> None:  # noqa: B027  -- most need nothing more
        """Get ready for the buckets."""

    @abstractmethod
    def receive(self, manifest: Manifest, version: int) -> Iterator[tuple[Bucket, torch.Tensor, int]]:
        """Yield each bucket in order, with the checksum that it was sent with. Its memory may be reused when the next
        one is asked for."""

    def placed(self, flat: torch.Tensor) -> torch.Tensor:
        """A received bucket on the engine's device."""
        return flat

    def leave(self, version: int, error: str, *, joined: bool) -> Mapping[str, Any]:
        """The update is over for this engine: give back its memory. Returns the content of "done"."""
        return {"error": error}
