"""Send buckets by broadcast, in process groups of one sending rank and all receivers, kept open between updates.

Each pipeline stage has a sending rank, so that no weights cross stages; without pipelines, rank 0 sends everything. The
engines receive buckets in manifest order, each through its sender's group. A group (gloo on CPU, NCCL on GPUs) is built
directly on a TCP store in rank 0's process, with or without a default group. In that store, the key `closed` says why
nobody should wait any more: whoever leaves sets it.

Both ends have two buffers, the trainer only on GPUs: while one bucket is broadcast, the trainer gathers the next and
the engines load the previous one.

Nobody blocks in a broadcast: both ends poll whether it is done, time is up, an engine is lost, or the other end has
left. NCCL alone would wait for a dead peer until its watchdog ends the process. (Polling does not help a process that
is inside a CUDA call that waits for the whole device, such as freeing memory under pressure, at the moment a peer dies
in a concurrent broadcast. It has to be killed.)
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from corerl.errors import WeightUpdateError
from corerl.messages import first_line
from corerl.weights import Address, Arriving, Bucket, Manifest, Receiver, WeightSender, digest

BUFFERS = 2  # per end
# Our own timeout must come before NCCL's, which is of no use here.
WATCHDOG_MARGIN = 60.0
# Read by torch when it creates an NCCL group: with "0", the watchdog leaves a failed collective to the waiting thread
# instead of ending the process.
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
SPIN_SECONDS = 2e-3  # of polling a broadcast without pauses
PAUSE_SECONDS = 5e-4  # between polls after that
ASK_SECONDS = 0.25  # between two checks of `closed`, which may be a round trip to the store
LEAVE_SECONDS = 5.0  # to wait for a group's abort, or for the store
CLOSED = "closed"


@define(eq=False)
class _SendBuffer:
    """A buffer, and the broadcasts that still read it."""

    memory: torch.Tensor
    works: list[Any] = field(factory=list)


@frozen(eq=False)
class _Expected:
    """A bucket that a receiver is waiting for."""

    bucket: Bucket
    flat: torch.Tensor  # [bucket.numel]
    digest: torch.Tensor  # [1] int64
    works: list[Any]


class BroadcastGroup:
    """The process group of one sender, which is rank 0 in it, and all receivers."""

    def __init__(self, address: Address, *, sender: int, rank: int, closed: Callable[[], str]) -> None:
        """Connect with the other members. Raises like `finish`. `closed` returns why to wait no more, or ""; it is
        called now and then during each wait."""
        self._closed = closed
        self._seconds = address.timeout
        self._timeout = timedelta(seconds=address.timeout)
        self._backend: Any = None
        size = 1 + len(address.engines)
        failed: list[Exception] = []
        given_up = threading.Event()
        device = torch.cuda.current_device() if address.device == "cuda" else None

        def meet() -> None:
            try:
                self._meet(address, sender, rank, size, device)
            except Exception as error:  # raised below, in the waiting thread
                failed.append(error)
            if given_up.is_set():
                self.abort()

        # In a thread, because if a member has died, neither library returns before its own timeout.
        meeting = threading.Thread(target=meet, daemon=True, name="weights: meet")
        meeting.start()
        try:
            self._wait(lambda: not meeting.is_alive(), "forming the group")
        except WeightUpdateError:
            given_up.set()
            self.abort()  # NCCL may wait for a member in its first broadcast
            raise
        if failed:
            raise failed[0]

    def _meet(self, address: Address, sender: int, rank: int, size: int, device: int | None) -> None:
        # Its own connection: while one waits for a key, nobody else can use it.
        store = dist.TCPStore(address.host, address.port, is_master=False, timeout=self._timeout)
        prefixed = dist.PrefixStore(f"group/{sender}", behind_token(store, address))
        if device is None:
            self._backend = dist.ProcessGroupGloo(prefixed, rank, size, self._timeout)
            return
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=address.timeout + WATCHDOG_MARGIN)
        with _environment(ERROR_HANDLING, "0"):
            self._backend = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        # NCCL connects at the first collective.
        self._backend.broadcast(torch.zeros(1, dtype=torch.uint8, device="cuda"), 0).wait()
        torch.cuda.current_stream().synchronize()

    def start(self, *tensors: torch.Tensor) -> list[Any]:
        """Start broadcasts from rank 0 to all, in place and in this order; pass the result to `finish`."""
        return [self._backend.broadcast(tensor.view(torch.uint8), 0) for tensor in tensors]

    def finish(self, works: Sequence[Any]) -> None:
        """Wait for broadcasts. Raises the library's error for a lost peer; WeightUpdateError if the address is closed,
        or the time is up."""
        for work in works:
            self._wait(work.is_completed, "a broadcast")
            work.wait(self._timeout)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        started = asked = time.monotonic()
        while not done():
            now = time.monotonic()
            if now - asked > ASK_SECONDS:
                asked = now
                if reason := self._closed():
                    raise WeightUpdateError(reason)
            if now - started > self._seconds:
                raise WeightUpdateError(f"{what} did not finish within {self._seconds:g} s")
            if now - started > SPIN_SECONDS:
                time.sleep(PAUSE_SECONDS)

    def abort(self) -> None:
        """Leave without notice; the others' next broadcast fails."""
        backend, self._backend = self._backend, None
        leaving = threading.Thread(target=_abort, args=(backend,), daemon=True, name="weights: leave")
        del backend  # gloo's destructor waits for its operations: let only that thread hold it
        leaving.start()
        leaving.join(LEAVE_SECONDS)


class CollectiveSender(WeightSender):
    """One rank's end. Rank 0 hosts the store at the address."""

    def __init__(self, address: Address, rank: int = 0, lost: Mapping[str, str] | None = None) -> None:
        super().__init__(address, rank, lost)
        self._listen_fd = address.listen_fd if rank == 0 else None  # until the store takes it over
        self._store: dist.Store | None = None
        self._group: BroadcastGroup | None = None
        # In host memory, GPU tensors would be gathered one by one and through unpinned memory.
        self._has_buffers = address.device != "cpu"
        self._buffers: deque[_SendBuffer] = deque()  # next one first

    def sending_rank(self, bucket: Bucket) -> int | None:
        return bucket.stage_rank

    def open(self, manifest: Manifest, version: int) -> None:
        self._largest = manifest.largest
        if self._group is None:
            self._store = self._open_store()
            self._group = BroadcastGroup(self.address, sender=self.rank, rank=0, closed=self._closed)

    def acquire_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        if not self._has_buffers:
            return None
        if not self._buffers:
            device = self.address.device
            try:
                made = [torch.empty(self._largest, dtype=dtype, device=device) for _ in range(BUFFERS)]
            except RuntimeError:  # no memory for two: then wait for each bucket instead
                return None
            self._buffers = deque(_SendBuffer(memory) for memory in made)
        self._finish(self._buffers[0])
        return self._buffers[0].memory[:numel]

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        buffer = next((each for each in self._buffers if each.memory.data_ptr() == flat.data_ptr()), None)
        if buffer is not None:
            buffer.works = self.transmit(flat, digest(flat).reshape(1))
            self._buffers.rotate(-1)
            return
        # If trainer and engine share a GPU, NCCL cannot connect them, and buckets are sent from the CPU.
        flat = flat.to(self.address.device).contiguous()
        self._group_now.finish(self.transmit(flat, digest(flat).reshape(1)))

    def transmit(self, flat: torch.Tensor, digest: torch.Tensor) -> list[Any]:
        """Start broadcasting one bucket and its checksum [1]; their memory is free once the returned works are done."""
        return self._group_now.start(flat, digest)

    def finish(self) -> dict[str, str]:
        for buffer in self._buffers:
            self._finish(buffer)
        self._buffers.clear()  # the memory is needed by others on this device
        return {}

    def close(self) -> None:
        if self._store is not None:
            _close(self._store, f"trainer rank {self.rank} has ended the update")
        if self._group is not None:
            self._group.abort()
        self._buffers.clear()
        self._group = self._store = None

    @property
    def _group_now(self) -> BroadcastGroup:
        assert self._group is not None
        return self._group

    def _finish(self, buffer: _SendBuffer) -> None:
        works, buffer.works = buffer.works, []
        self._group_now.finish(works)

    def _open_store(self) -> dist.Store:
        address, listen_fd, self._listen_fd = self.address, self._listen_fd, None
        try:
            return behind_token(
                dist.TCPStore(
                    address.host,
                    address.port,
                    is_master=self.rank == 0,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=address.timeout),
                    master_listen_fd=listen_fd,
                ),
                address,
            )
        except dist.DistNetworkError as error:
            raise WeightUpdateError(
                f"port {address.port}, chosen for sending weights, is in use: another process has taken it; start "
                f"the run again ({first_line(error)})"
            ) from error

    def _closed(self) -> str:
        lost = next((f"{name}: {reason}" for name, reason in dict(self.lost).items()), "")
        return lost or _why_closed(self._store)


class CollectiveReceiver(Receiver):
    def __init__(self, address: Address, index: int) -> None:
        super().__init__(address, index)
        self._store: dist.Store | None = None
        self._groups: dict[int, BroadcastGroup] = {}  # by sender
        self._buffers: deque[torch.Tensor] = deque()  # reused, since new memory costs more than writing to it

    def receive(self, manifest: Manifest, version: int) -> Arriving:
        rest, expected = deque(manifest.buckets), deque[_Expected]()
        arrived = 0
        try:
            self._join(manifest)
            self._allocate(manifest)
            while rest or expected:
                came = self._next(rest, expected)
                yield came.bucket, came.flat, int(came.digest.item())
                arrived += 1
        except GeneratorExit:  # this engine has failed: the others still need its part in the broadcasts that remain
            with contextlib.suppress(Exception):  # what failed first is the error
                while rest or expected:
                    self._next(rest, expected)
            raise
        except Exception as error:
            self._leave(first_line(error))
            raise WeightUpdateError(
                f"bucket {arrived} of version {version} did not arrive: {first_line(error)}"
            ) from error
        finally:
            if self.address.device != "cpu":  # others on this device need the memory
                self._buffers.clear()

    def close(self) -> None:
        self._leave(f"{self.address.engines[self.index]} has left")

    def _join(self, manifest: Manifest) -> None:
        """Form the senders' groups, unless they exist."""
        address = self.address
        if self._store is None:
            timeout = timedelta(seconds=address.timeout)
            store = dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout)
            self._store = behind_token(store, address)
        for sender in manifest.stage_ranks:
            if sender not in self._groups:
                self._groups[sender] = BroadcastGroup(
                    address, sender=sender, rank=1 + self.index, closed=lambda: _why_closed(self._store)
                )

    def _allocate(self, manifest: Manifest) -> None:
        size, dtype, device = manifest.largest, getattr(torch, manifest.dtype), self.address.device
        if self._buffers and self._buffers[0].numel() >= size and self._buffers[0].dtype == dtype:
            return
        self._buffers.clear()
        try:
            self._buffers.extend(torch.empty(size, dtype=dtype, device=device) for _ in range(BUFFERS))
        except RuntimeError as error:
            needs = f"{BUFFERS} buckets of {size * dtype.itemsize} bytes"
            raise WeightUpdateError(f"not enough memory on {device} to receive {needs}: {first_line(error)}") from error

    def _next(self, rest: deque[Bucket], expected: deque[_Expected]) -> _Expected:
        """Wait for the first bucket. The one after it is received concurrently, but not from another sender: two groups
        active on one device could deadlock if devices started them in different order."""
        if not expected:
            expected.append(self._start(rest.popleft()))
        bucket = expected[0].bucket
        if rest and rest[0].stage_rank == bucket.stage_rank:
            expected.append(self._start(rest.popleft()))
        self._groups[bucket.stage_rank].finish(expected[0].works)
        return expected.popleft()

    def _start(self, bucket: Bucket) -> _Expected:
        """Start receiving a bucket, into the buffer that was used least recently."""
        flat = self._buffers[0][: bucket.numel]
        self._buffers.rotate(-1)
        digest = torch.empty(1, dtype=torch.int64, device=self.address.device)
        return _Expected(bucket, flat, digest, self._groups[bucket.stage_rank].start(flat, digest))

    def _leave(self, reason: str) -> None:
        if self._store is not None:
            _close(self._store, reason)
        for group in self._groups.values():
            group.abort()
        self._groups, self._store = {}, None


def _close(store: dist.Store, reason: str) -> None:
    """Tell all who wait at the store to stop; the first reason stays."""

    def close() -> None:
        with contextlib.suppress(dist.DistError):  # the store is gone too, which the others notice themselves
            if not store.check([CLOSED]):
                store.set(CLOSED, reason)

    # In a thread: if the store's machine is gone, its answer may be awaited for a quarter of an hour.
    closing = threading.Thread(target=close, daemon=True, name="weights: close")
    closing.start()
    closing.join(LEAVE_SECONDS)


def _why_closed(store: dist.Store | None) -> str:
    """Why nobody should wait any more; "" if the store is open."""
    assert store is not None
    try:
        return store.get(CLOSED).decode() if store.check([CLOSED]) else ""
    except dist.DistError as error:
        return f"the trainer's store is gone: {first_line(error)}"


def behind_token(store: dist.Store, address: Address) -> dist.Store:
    """The part of a store whose keys begin with the address's token: who does not know it reads and writes others."""
    return dist.PrefixStore(address.token, store)


def _abort(backend: Any) -> None:
    if backend is not None:
        backend.abort()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
