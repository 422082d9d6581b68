"""Send buckets by broadcast, in process groups of one sending trainer rank and the engines, kept open between updates.

Each pipeline stage has a sending rank, so that no weights cross stages; without pipelines, rank 0 sends everything. The
engines receive buckets in manifest order, each through its sender's group. A group (gloo on CPU, NCCL on GPUs) is built
directly on a TCP store, with or without a default group. The store also carries what must not hang: who takes part in
an update, which rank 0 decides for all, and the outcome. For update `v`, engine `i`, groups of generation `g`:

    v/ready/i   engine -> rank 0         its manifest's digest and the generation it is in; or that it refuses
    v/go/i      rank 0 -> engine         the generation and its members; or why the engine is left out
    v/begin/r   rank 0 -> sender r       the same
    v/done/i    engine -> rank 0         "" or why it did not commit
    broken/g    a sender -> all others   why it left its group, so that nobody keeps waiting in its broadcast

Both ends have two buffers, the trainer only on GPUs: while one bucket is broadcast, the trainer gathers the next and
the engines load the previous one.

An engine that does not join is left out, and the groups are rebuilt without it; it is asked again at the next update.
Nobody blocks in a broadcast: both ends poll whether it is done, time is up, or the other end has died. NCCL alone would
wait for a dead peer until its watchdog ends the process. (Polling does not help a process that is inside a CUDA call
that waits for the whole device, such as freeing memory under pressure, at the moment a peer dies in the broadcast
beside it. It has to be killed.)
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from corerl.errors import WeightUpdateError
from corerl.messages import first_line
from corerl.weights.checksum import checksum, digest
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import Address, WeightReceiver, WeightSender, require_undamaged
from corerl.weights.transports.group import BroadcastGroup, behind_token

BUFFERS = 2  # per end
ASK_SECONDS = 0.25  # between two queries of the store, each a round trip
BROKEN_GRACE = 10.0  # seconds for the engines' reports once a group is known to be broken, which they notice too


@define(eq=False)
class _Room:
    """A send buffer, and the broadcasts that still read it."""

    memory: torch.Tensor
    works: list[Any] = field(factory=list)


@frozen(eq=False)
class _Coming:
    """A bucket that a receiver is waiting for."""

    bucket: Bucket
    flat: torch.Tensor  # [bucket.numel]
    digest: torch.Tensor  # [1] int64
    works: list[Any]


def _group_name(generation: int, sender: int) -> str:
    return f"{generation}/{sender}"


class CollectiveSender(WeightSender):
    """One rank's end; its own failures and the engines' become entries in `commit`. Rank 0 hosts the store at the
    address, and collects the engines' answers."""

    def __init__(self, address: Address, rank: int = 0) -> None:
        super().__init__()
        self._address = address
        self._rank = rank
        self._listening = address.listening  # until the store takes it over
        self._store: dist.Store | None = None
        self._group: BroadcastGroup | None = None
        self._generation = 0
        self._others: tuple[int, ...] = ()  # the other sending ranks
        self._asked_store = 0.0  # time.monotonic() of the last query whether another sender's group is broken
        self._members: tuple[int, ...] = ()  # engines in the group
        self._answers: dict[int, str] = {}  # by receiver: "" if it committed
        self._broken = ""
        # In host memory, GPU tensors would be gathered one by one and through unpinned memory.
        self._has_rooms = address.device != "cpu"
        self._rooms: deque[_Room] = deque()  # next one first
        self._largest = 0  # elements of this update's largest bucket

    def sender_of(self, bucket: Bucket) -> int | None:
        return bucket.sender

    def begin(self, manifest: Manifest, version: int) -> None:
        self.version = version
        self._answers, self._broken, self._largest = {}, "", manifest.largest
        self._rooms.clear()  # left over from an unfinished update
        try:
            store = self._open_store()
            self._others = tuple(rank for rank in manifest.senders if rank != self._rank)
            if self._rank == 0:
                ready = self._collect_ready(store, manifest, version)
                generation, members = self._decide(store, ready, version)
            else:
                generation, members = self._hear_decision(store, version)
            self._form_group(generation, members)
        except Exception as error:
            self._break(error)

    def acquire_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        if self._group is None or not self._has_rooms:
            return None
        if not self._rooms:
            try:
                made = [torch.empty(self._largest, dtype=dtype, device=self._address.device) for _ in range(BUFFERS)]
            except RuntimeError:  # no memory for two: then wait for each bucket instead
                return None
            self._rooms = deque(_Room(memory) for memory in made)
        self._finish(self._rooms[0])
        return self._rooms[0].memory[:numel] if self._group is not None else None

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if self._group is None:
            return
        room = next((each for each in self._rooms if each.memory.data_ptr() == flat.data_ptr()), None)
        try:
            if room is not None:
                room.works = self.transmit(flat, digest(flat).reshape(1))
                self._rooms.rotate(-1)
                return
            # If trainer and engine share a GPU, NCCL cannot connect them, and buckets are sent from the CPU.
            flat = flat.to(self._address.device).contiguous()
            self._group.finish(self.transmit(flat, digest(flat).reshape(1)), self._lost_member)
        except Exception as error:
            self._break(error)

    def transmit(self, flat: torch.Tensor, digest: torch.Tensor) -> list[Any]:
        """Start broadcasting one bucket and its checksum [1]; their memory is free once the returned works are done."""
        assert self._group is not None
        return self._group.start(flat, digest)

    def _finish(self, room: _Room) -> None:
        works, room.works = room.works, []
        if self._group is None:
            return
        try:
            self._group.finish(works, self._lost_member)
        except Exception as error:
            self._break(error)

    def _settle(self) -> None:
        """Wait until everything has been sent."""
        for room in self._rooms:
            self._finish(room)

    def commit(self) -> Mapping[str, str]:
        self._settle()
        self._rooms.clear()  # the memory is needed by others on this device
        if self._rank != 0:  # engines report to rank 0, also about this rank's buckets
            return {}
        if self._store is not None:
            grace = min(BROKEN_GRACE, self._address.timeout) if self._broken else self._address.timeout
            deadline = time.monotonic() + grace
            for index in self._members:
                answer = self._answer(self._store, f"{self.version}/done/{index}", index, deadline)
                if answer is None:
                    reason = self.given_up.get(self._address.engines[index]) or self._broken
                    self._answers[index] = self._address.not_committed(self.version, reason)
                    self._drop_group()
                else:
                    self._answers[index] = answer["error"]
        answers = self._address.by_engine(self._answers)
        return {name: answers.get(name, self._broken) for name in self._address.engines}

    def close(self) -> None:
        self._drop_group()
        self._rooms.clear()
        self._store = None

    def _open_store(self) -> dist.Store:
        if self._store is None:
            address, listening, self._listening = self._address, self._listening, None
            try:
                store = dist.TCPStore(
                    address.host,
                    address.port,
                    is_master=self._rank == 0,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=address.timeout),
                    master_listen_fd=listening if self._rank == 0 else None,
                )
                self._store = behind_token(store, address)
            except dist.DistNetworkError as error:
                raise WeightUpdateError(
                    f"port {address.port}, chosen for sending weights, is in use: another process has taken it; start "
                    f"the run again ({first_line(error)})"
                ) from error
        return self._store

    def _collect_ready(self, store: dist.Store, manifest: Manifest, version: int) -> dict[int, int]:
        """Receivers that take part -> the generation each is in; the others' reasons go to `_answers`."""
        ready: dict[int, int] = {}
        deadline = time.monotonic() + self._address.timeout
        for index, name in enumerate(self._address.engines):
            answer = self._answer(store, f"{version}/ready/{index}", index, deadline)
            if answer is None:
                self._answers[index] = self.given_up.get(name, self._address.not_joined(version))
            elif answer.get("error"):
                self._answers[index] = answer["error"]
            elif answer["digest"] != manifest.digest:
                self._answers[index] = self._address.other_tensors(index, version)
                _put(store, f"{version}/go/{index}", {"error": self._answers[index]})
            else:
                ready[index] = answer["generation"]
        return ready

    def _decide(self, store: dist.Store, ready: dict[int, int], version: int) -> tuple[int, tuple[int, ...]]:
        """Decide on the groups' generation and engines, and announce them. Existing groups are reused if they are
        intact and have exactly these engines; otherwise new ones are built."""
        members = tuple(ready)
        whole = self._group is not None and not store.check([f"broken/{self._generation}"])
        reusable = whole and members == self._members and set(ready.values()) == {self._generation}
        generation = self._generation if reusable else self._generation + 1
        decision = {"generation": generation, "members": members}
        for key in [f"go/{index}" for index in members] + [f"begin/{rank}" for rank in self._others]:
            _put(store, f"{version}/{key}", decision)
        return generation, members

    def _hear_decision(self, store: dist.Store, version: int) -> tuple[int, tuple[int, ...]]:
        # Rank 0 may wait for the engines up to its own timeout, counted from when it begins.
        decision = _take(store, f"{version}/begin/{self._rank}", 2 * self._address.timeout)
        if decision is None:
            raise WeightUpdateError(
                f"rank 0 did not begin the update to version {version} within {2 * self._address.timeout:g} s"
            )
        return decision["generation"], tuple(decision["members"])

    def _form_group(self, generation: int, members: tuple[int, ...]) -> None:
        """Form a group of this rank and those engines, unless it exists."""
        if generation == self._generation and self._group is not None:
            return
        self._drop_group()
        self._generation, self._members = generation, members
        if members:
            self._group = BroadcastGroup(
                self._address,
                name=_group_name(generation, self._rank),
                rank=0,
                size=len(members) + 1,
                broken=self._lost_member,
            )

    def _answer(self, store: dist.Store, key: str, index: int, deadline: float) -> dict[str, Any] | None:
        """A receiver's message under `key`; None if the time is up or its engine is given up."""
        name = self._address.engines[index]
        while True:
            left = deadline - time.monotonic()
            answer = _take(store, key, 0.0 if name in self.given_up else min(left, ASK_SECONDS))
            if answer is not None or left <= 0 or name in self.given_up:
                return answer

    def _lost_member(self) -> str:
        """Why to stop waiting: an engine of the group was given up, or another sender left its group; otherwise "". The
        store is only queried now and then."""
        names = [self._address.engines[index] for index in self._members]
        if lost := next((f"{name}: {self.given_up[name]}" for name in names if name in self.given_up), ""):
            return lost
        if not self._others or self._store is None or time.monotonic() - self._asked_store < ASK_SECONDS:
            return ""
        self._asked_store = time.monotonic()
        return _left(self._store, self._generation)

    def _break(self, error: Exception) -> None:
        self._broken = f"the collective failed: {first_line(error)}"
        if self._store is not None and self._members:
            with contextlib.suppress(dist.DistError):  # the store is gone too, which the others notice by themselves
                _put(self._store, f"broken/{self._generation}", {"error": self._broken})
        self._drop_group()

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None


class CollectiveReceiver(WeightReceiver):
    def __init__(self, address: Address, index: int) -> None:
        self._address = address
        self._index = index
        self._store: dist.Store | None = None
        self._groups: dict[int, BroadcastGroup] = {}  # by sender, all of one generation
        self._asked: int | None = None  # the version it asked to join
        self._joined: int | None = None  # the version it has joined
        self._generation = 0  # of its current groups
        self._asked_store = 0.0  # time.monotonic() of the last query whether a group is broken
        self._rest: deque[Bucket] = deque()  # buckets whose receive has not been started
        self._coming: deque[_Coming] = deque()  # in order
        self._buffers: deque[torch.Tensor] = deque()  # reused, since new memory costs more than writing to it

    def buckets(self, manifest: Manifest, version: int) -> Iterator[tuple[Bucket, torch.Tensor]]:
        self._take_memory(manifest)  # if this fails, the engine is left out, and nobody waits for it
        try:
            self._join(manifest, version)
        except WeightUpdateError:
            raise
        except Exception as error:
            raise WeightUpdateError(f"cannot join the update to version {version}: {first_line(error)}") from error
        self._rest = deque(manifest.buckets)
        while self._rest or self._coming:
            if not self._coming:
                self._expect(version)
            # Receive the next one concurrently, but not from another sender: two groups active on one device could
            # deadlock if devices started them in different order.
            if self._rest and self._rest[0].sender == self._coming[-1].bucket.sender:
                self._expect(version)
            came, sent = self._receive(version)
            got = checksum(came.flat)
            require_undamaged(came.bucket, version, got=got, sent=sent)
            yield came.bucket, came.flat

    def acknowledge(self, version: int, error: str) -> None:
        asked, joined = self._asked == version, self._joined == version
        self._asked = self._joined = None
        if not joined:
            self._give_memory_back()
            if not asked:  # otherwise the sender itself has left this engine out
                self._tell(f"{version}/ready/{self._index}", error or "did not read the update")
            return
        # An engine that stops early still takes part in the remaining broadcasts, which the others need.
        try:
            while self._rest or self._coming:
                if not self._coming:
                    self._expect(version)
                self._receive(version)
        except WeightUpdateError as failure:
            error = error or failure.message
        self._give_memory_back()
        self._tell(f"{version}/done/{self._index}", error)

    def close(self) -> None:
        self._drop_groups()
        self._store = None

    def _open_store(self) -> dist.Store:
        if self._store is None:
            address = self._address
            timeout = timedelta(seconds=address.timeout)
            store = dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout)
            self._store = behind_token(store, address)
        return self._store

    def _tell(self, key: str, error: str) -> None:
        try:
            _put(self._open_store(), key, {"error": error})
        except Exception as failure:
            raise WeightUpdateError(f"cannot report to the trainer: {first_line(failure)}") from failure

    def _take_memory(self, manifest: Manifest) -> None:
        size, dtype, device = manifest.largest, getattr(torch, manifest.dtype), self._address.device
        if self._buffers and self._buffers[0].numel() >= size and self._buffers[0].dtype == dtype:
            return
        self._buffers.clear()
        try:
            self._buffers.extend(torch.empty(size, dtype=dtype, device=device) for _ in range(BUFFERS))
        except RuntimeError as error:
            needs = f"{BUFFERS} buckets of {size * dtype.itemsize} bytes"
            raise WeightUpdateError(f"not enough memory on {device} to receive {needs}: {first_line(error)}") from error

    def _give_memory_back(self) -> None:
        if self._address.device != "cpu":  # others on this device need the memory
            self._buffers.clear()

    def _join(self, manifest: Manifest, version: int) -> None:
        store = self._open_store()
        self._rest.clear()
        self._coming.clear()
        self._asked = version
        current = self._generation if self._groups else 0
        _put(store, f"{version}/ready/{self._index}", {"digest": manifest.digest, "generation": current})
        # The sender answers when every engine has joined or its timeout is over: twice the timeout is surely enough.
        answer = _take(store, f"{version}/go/{self._index}", 2 * self._address.timeout)
        if answer is None:
            raise WeightUpdateError(
                f"the trainer did not begin the update to version {version} within {2 * self._address.timeout:g} s"
            )
        if answer.get("error"):
            raise WeightUpdateError(answer["error"])
        self._joined = version
        if answer["generation"] == current:
            return
        self._drop_groups()
        members: list[int] = answer["members"]
        self._generation = answer["generation"]
        try:
            for sender in manifest.senders:
                self._groups[sender] = BroadcastGroup(
                    self._address,
                    name=_group_name(self._generation, sender),
                    rank=1 + members.index(self._index),
                    size=len(members) + 1,
                    broken=self._left_by_sender,
                )
        except BaseException:
            self._drop_groups()  # otherwise it would count as a member of all of them
            raise

    def _expect(self, version: int) -> None:
        """Start receiving the next bucket, into the buffer that was used least recently."""
        bucket = self._rest.popleft()
        flat = self._buffers[0][: bucket.numel]
        self._buffers.rotate(-1)
        digest = torch.empty(1, dtype=torch.int64, device=self._address.device)
        try:
            if bucket.sender not in self._groups:
                raise WeightUpdateError("the group is closed")
            works = self._groups[bucket.sender].start(flat, digest)
        except Exception as error:
            raise self._missed(bucket, version, error) from error
        self._coming.append(_Coming(bucket, flat, digest, works))

    def _receive(self, version: int) -> tuple[_Coming, int]:
        """Wait for the first expected bucket; returns it with the checksum it was sent with."""
        came = self._coming.popleft()
        try:
            self._groups[came.bucket.sender].finish(came.works, self._left_by_sender)
            return came, int(came.digest.item())
        except Exception as error:
            raise self._missed(came.bucket, version, error) from error

    def _missed(self, bucket: Bucket, version: int, error: Exception) -> WeightUpdateError:
        """Abandon the rest of this update; returns the error to raise."""
        self._drop_groups()
        self._rest.clear()
        self._coming.clear()
        return WeightUpdateError(f"bucket {bucket.index} of version {version} did not arrive: {first_line(error)}")

    def _left_by_sender(self) -> str:
        """Why a sender has left its group, otherwise ""; the store is only queried now and then."""
        if self._store is None or time.monotonic() - self._asked_store < ASK_SECONDS:
            return ""
        self._asked_store = time.monotonic()
        return _left(self._store, self._generation)

    def _drop_groups(self) -> None:
        for group in self._groups.values():
            group.abort()
        self._groups = {}


def _put(store: dist.Store, key: str, value: Mapping[str, Any]) -> None:
    store.set(key, json.dumps(value))


def _take(store: dist.Store, key: str, timeout: float) -> dict[str, Any] | None:
    """Wait for the value and remove it, so that no later update reads it; None if the time is up."""
    try:
        store.wait([key], timedelta(seconds=max(timeout, 0.001)))
    except dist.DistStoreError:
        return None
    value: dict[str, Any] = json.loads(store.get(key))
    store.delete_key(key)
    return value


def _left(store: dist.Store, generation: int) -> str:
    """Why a sender has left its group of this generation; "" if none has."""
    key = f"broken/{generation}"
    return str(json.loads(store.get(key))["error"]) if store.check([key]) else ""
