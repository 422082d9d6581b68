"""Send buckets by broadcast, in process groups of one sending trainer rank and the engines, kept open between updates.

Each pipeline stage has a sending rank, so that no weights cross stages; without pipelines, rank 0 sends everything. The
engines receive buckets in manifest order, each through its sender's group. A group (gloo on CPU, NCCL on GPUs) is built
directly on a TCP store, with or without a default group. The store also carries what must not hang: the protocol, which
rank 0 keeps for all senders, and what they tell each other. For update `v`, engine `i`, groups of generation `g`:

    v/ask/i      the generation it is in, too
    v/answer/i   the generation to be in, and its members
    v/done/i
    v/begin/r    rank 0 -> sender r       what it has answered the engines
    broken/g     a sender -> all others   why it left its group, so that nobody keeps waiting in its broadcast

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
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from corerl.errors import WeightUpdateError
from corerl.messages import first_line
from corerl.weights.checksums import digest
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import Address
from corerl.weights.transports.group import BroadcastGroup, behind_token
from corerl.weights.transports.protocol import Receiver, Sender

BUFFERS = 2  # per end
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


class CollectiveSender(Sender):
    """One rank's end. Rank 0 hosts the store at the address, and meets the engines."""

    def __init__(self, address: Address, rank: int = 0) -> None:
        # Engines report to rank 0, also about other ranks' buckets.
        super().__init__(address, range(len(address.engines)) if rank == 0 else ())
        self._rank = rank
        self._listening = address.listening  # until the store takes it over
        self._store: dist.Store | None = None
        self._group: BroadcastGroup | None = None
        self._generation = 0
        self._others: tuple[int, ...] = ()  # the other sending ranks
        self._members: tuple[int, ...] = ()  # engines in the group
        # In host memory, GPU tensors would be gathered one by one and through unpinned memory.
        self._has_rooms = address.device != "cpu"
        self._rooms: deque[_Room] = deque()  # next one first

    def sender_of(self, bucket: Bucket) -> int | None:
        return bucket.sender

    def open(self) -> None:
        self._rooms.clear()  # left over from an unfinished update
        with self._breaking():
            store = self._open_store()
            self._others = tuple(rank for rank in self.manifest.senders if rank != self._rank)
            self._form_group(*(self._decide(store) if self._rank == 0 else self._hear_decision(store)))

    def acquire_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        if self._group is None or not self._has_rooms:
            return None
        if not self._rooms:
            size, device = self.manifest.largest, self.address.device
            try:
                made = [torch.empty(size, dtype=dtype, device=device) for _ in range(BUFFERS)]
            except RuntimeError:  # no memory for two: then wait for each bucket instead
                return None
            self._rooms = deque(_Room(memory) for memory in made)
        self._finish(self._rooms[0])
        return self._rooms[0].memory[:numel] if self._group is not None else None

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if self._group is None:
            return
        room = next((each for each in self._rooms if each.memory.data_ptr() == flat.data_ptr()), None)
        with self._breaking():
            if room is not None:
                room.works = self.transmit(flat, digest(flat).reshape(1))
                self._rooms.rotate(-1)
                return
            # If trainer and engine share a GPU, NCCL cannot connect them, and buckets are sent from the CPU.
            flat = flat.to(self.address.device).contiguous()
            self._group.finish(self.transmit(flat, digest(flat).reshape(1)))

    def transmit(self, flat: torch.Tensor, digest: torch.Tensor) -> list[Any]:
        """Start broadcasting one bucket and its checksum [1]; their memory is free once the returned works are done."""
        assert self._group is not None
        return self._group.start(flat, digest)

    def _finish(self, room: _Room) -> None:
        works, room.works = room.works, []
        if self._group is not None:
            with self._breaking():
                self._group.finish(works)

    def finish(self) -> None:
        for room in self._rooms:
            self._finish(room)
        self._rooms.clear()  # the memory is needed by others on this device

    def close(self) -> None:
        self._drop_group()
        self._rooms.clear()
        self._store = None

    # ---- engines and other senders -----------------------------------------------------------------------------------

    @property
    def patience(self) -> float:
        return min(BROKEN_GRACE, self.address.timeout) if self.broken else self.address.timeout

    def listen(self, seconds: float) -> None:
        for index in self.awaited:
            joined = index in self.taking
            message = _take(self._store, f"{self.version}/{'done' if joined else 'ask'}/{index}", seconds)
            if message is None:
                seconds = 0.0  # one has been waited for
            elif joined:
                self.done(index, message["error"])
            else:
                self.asked(index, message)

    def admit(self, index: int) -> None:
        """The answer depends on who else comes."""

    def answer(self, index: int, question: Mapping[str, Any], error: str) -> None:
        _put(self._store, f"{self.version}/answer/{index}", {"error": error})

    def left_out(self, index: int, reason: str) -> None:
        if index in self._members:
            self._drop_group()

    def _open_store(self) -> dist.Store:
        if self._store is None:
            address, listening, self._listening = self.address, self._listening, None
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

    def _decide(self, store: dist.Store) -> tuple[int, tuple[int, ...]]:
        """Meet the engines, decide on the groups' generation and members, and announce them. Existing groups are reused
        if they are intact and have exactly these engines; otherwise new ones are built."""
        self.meet()
        members = tuple(sorted(self.taking))
        whole = self._group is not None and not store.check([f"broken/{self._generation}"])
        here = all(message["generation"] == self._generation for message in self.taking.values())
        generation = self._generation if whole and here and members == self._members else self._generation + 1
        decision = {"error": "", "generation": generation, "members": members}
        for key in [f"answer/{index}" for index in members] + [f"begin/{rank}" for rank in self._others]:
            _put(store, f"{self.version}/{key}", decision)
        return generation, members

    def _hear_decision(self, store: dist.Store) -> tuple[int, tuple[int, ...]]:
        # Rank 0 may wait for the engines up to its own timeout, counted from when it begins.
        seconds = 2 * self.address.timeout
        decision = _take(store, f"{self.version}/begin/{self._rank}", seconds)
        if decision is None:
            raise WeightUpdateError(f"rank 0 did not begin the update to version {self.version} within {seconds:g} s")
        return decision["generation"], tuple(decision["members"])

    def _form_group(self, generation: int, members: tuple[int, ...]) -> None:
        """Form a group of this rank and those engines, unless it exists."""
        if generation == self._generation and self._group is not None:
            return
        self._drop_group()
        self._generation, self._members = generation, members
        if members:
            self._group = BroadcastGroup(
                self.address,
                name=_group_name(generation, self._rank),
                rank=0,
                size=len(members) + 1,
                broken=self._lost_member,
            )

    def _lost_member(self) -> str:
        """Why to stop waiting: an engine of the group was given up, or another sender left its group; otherwise ""."""
        names = [self.address.engines[index] for index in self._members]
        if lost := next((f"{name}: {self.given_up[name]}" for name in names if name in self.given_up), ""):
            return lost
        return _left(self._store, self._generation) if self._others else ""

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Whatever fails in the block ends this rank's part in the update."""
        try:
            yield
        except Exception as error:
            self.broken = f"the collective failed: {first_line(error)}"
            if self._store is not None and self._members:
                with contextlib.suppress(dist.DistError):  # the store is gone too, which the others notice themselves
                    _put(self._store, f"broken/{self._generation}", {"error": self.broken})
            self._drop_group()
            self.drop_all(self.broken, but=self._members)  # these notice it, and say more

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None


class CollectiveReceiver(Receiver):
    def __init__(self, address: Address, index: int) -> None:
        super().__init__(address, index)
        self._store: dist.Store | None = None
        self._groups: dict[int, BroadcastGroup] = {}  # by sender, all of one generation
        self._generation = 0  # of its current groups
        self._rest: deque[Bucket] = deque()  # buckets whose receive has not been started
        self._coming: deque[_Coming] = deque()  # in order
        self._buffers: deque[torch.Tensor] = deque()  # reused, since new memory costs more than writing to it

    def prepare(self, manifest: Manifest) -> None:
        size, dtype, device = manifest.largest, getattr(torch, manifest.dtype), self.address.device
        self._rest.clear()
        self._coming.clear()
        if self._buffers and self._buffers[0].numel() >= size and self._buffers[0].dtype == dtype:
            return
        self._buffers.clear()
        try:
            self._buffers.extend(torch.empty(size, dtype=dtype, device=device) for _ in range(BUFFERS))
        except RuntimeError as error:
            needs = f"{BUFFERS} buckets of {size * dtype.itemsize} bytes"
            raise WeightUpdateError(f"not enough memory on {device} to receive {needs}: {first_line(error)}") from error

    def say(self, what: str, version: int, **content: Any) -> None:
        if what == "ask":
            content["generation"] = self._generation if self._groups else 0
        try:
            if self._store is None:
                address = self.address
                timeout = timedelta(seconds=address.timeout)
                store = dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout)
                self._store = behind_token(store, address)
            _put(self._store, f"{version}/{what}/{self.index}", {"version": version, **content})
        except Exception as failure:
            raise WeightUpdateError(f"cannot report to the trainer: {first_line(failure)}") from failure

    def hear(self, version: int) -> Mapping[str, Any]:
        answer = _take(self._store, f"{version}/answer/{self.index}", self.patience)
        if answer is None:
            raise WeightUpdateError(
                f"the trainer did not begin the update to version {version} within {self.patience:g} s"
            )
        return answer

    def join(self, manifest: Manifest, answer: Mapping[str, Any]) -> None:
        if self._groups and answer["generation"] == self._generation:
            return
        self._drop_groups()
        members: list[int] = answer["members"]
        self._generation = answer["generation"]
        try:
            for sender in manifest.senders:
                self._groups[sender] = BroadcastGroup(
                    self.address,
                    name=_group_name(self._generation, sender),
                    rank=1 + members.index(self.index),
                    size=len(members) + 1,
                    broken=lambda: _left(self._store, self._generation),
                )
        except BaseException:
            self._drop_groups()  # otherwise it would count as a member of all of them
            raise

    def receive(self, manifest: Manifest, version: int) -> Iterator[tuple[Bucket, torch.Tensor, int]]:
        self._rest = deque(manifest.buckets)
        while self._rest or self._coming:
            came = self._next(version)
            yield came.bucket, came.flat, int(came.digest.item())

    def leave(self, version: int, error: str, *, joined: bool) -> Mapping[str, Any]:
        # An engine that stops early still takes part in the remaining broadcasts, which the others need.
        try:
            while joined and (self._rest or self._coming):
                self._next(version)
        except WeightUpdateError as failure:
            error = error or failure.message
        if self.address.device != "cpu":  # others on this device need the memory
            self._buffers.clear()
        return {"error": error}

    def close(self) -> None:
        self._drop_groups()
        self._store = None

    def _next(self, version: int) -> _Coming:
        """Wait for the first expected bucket. The one after it is received concurrently, but not from another sender:
        two groups active on one device could deadlock if devices started them in different order."""
        bucket = self._coming[0].bucket if self._coming else self._rest[0]
        try:
            if not self._coming:
                self._expect()
            if self._rest and self._rest[0].sender == bucket.sender:
                self._expect()
            came = self._coming.popleft()
            self._groups[bucket.sender].finish(came.works)
            return came
        except Exception as error:
            self._drop_groups()
            self._rest.clear()
            self._coming.clear()
            raise WeightUpdateError(
                f"bucket {bucket.index} of version {version} did not arrive: {first_line(error)}"
            ) from error

    def _expect(self) -> None:
        """Start receiving the next bucket, into the buffer that was used least recently."""
        bucket = self._rest.popleft()
        flat = self._buffers[0][: bucket.numel]
        self._buffers.rotate(-1)
        digest = torch.empty(1, dtype=torch.int64, device=self.address.device)
        self._coming.append(_Coming(bucket, flat, digest, self._groups[bucket.sender].start(flat, digest)))

    def _drop_groups(self) -> None:
        for group in self._groups.values():
            group.abort()
        self._groups = {}


def _put(store: dist.Store | None, key: str, value: Mapping[str, Any]) -> None:
    assert store is not None
    store.set(key, json.dumps(value))


def _take(store: dist.Store | None, key: str, timeout: float) -> dict[str, Any] | None:
    """Wait for the value and remove it, so that no later update reads it; None if the time is up."""
    assert store is not None
    try:
        if timeout <= 0 and not store.check([key]):  # the store would wait without a limit, and complain of a short one
            return None
        store.wait([key], timedelta(seconds=max(timeout, 0.001)))
    except dist.DistStoreError:
        return None
    value: dict[str, Any] = json.loads(store.get(key))
    store.delete_key(key)
    return value


def _left(store: dist.Store | None, generation: int) -> str:
    """Why a sender has left its group of this generation; "" if none has."""
    assert store is not None
    key = f"broken/{generation}"
    return str(json.loads(store.get(key))["error"]) if store.check([key]) else ""
