"""Host memory for copies of sleeping device memory: pinned once, by background threads, and then kept."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import resource
import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from attrs import frozen
from torch.distributed import ProcessGroup

from corerl.weights.gather import all_gather_json
from corerl.weights.pinning import CudaPinning

SEGMENT = 2**30  # bytes that one thread touches and pins at a time, at most
SMALLEST_SEGMENT = 2**26
ALIGNMENT = 512  # bytes; the alignment of a copy's start
MEMINFO, CONTAINER = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
THREADS = 16  # more are no faster: the kernel's page allocation and the driver's pinning are the limit


@frozen(eq=False)
class Piece:
    """A range of bytes in one segment, beginning at `start`."""

    segment: int
    start: int
    memory: torch.Tensor  # [n] uint8


@frozen(eq=False)
class Segment:
    memory: torch.Tensor  # [n] uint8
    refusal: str  # why it is not pinned; "" if it is


class HostMemory:
    """Ordinary memory, allocated on demand and not kept: enough for a CPU."""

    refusal = ""  # why memory that should be pinned is not

    def reserve(self, nbytes: int, group: ProcessGroup | None = None) -> None:
        """Announce how much will be needed in total; returns at once, or as soon as all ranks of `group` have called.
        Raises MemoryError if the host has too little for its ranks together."""

    def take(self, nbytes: int) -> list[Piece]:
        """`nbytes` or a little more, in one or several pieces. Raises if the host has too little."""
        return [Piece(0, 0, torch.empty(nbytes, dtype=torch.uint8))]

    def give_back(self, pieces: Iterable[Piece]) -> None:
        """Return pieces, to be handed out again."""

    def close(self) -> None:
        """Release everything. Called once, after all copies are done."""


class PinnedPool(HostMemory):
    """A pool of segments, each touched and pinned in its own thread task. `take` waits for segments in the making, and
    makes more if needed; nothing is unpinned before `close`.

    Pieces never span two segments: the driver refuses a copy that does. If pinning is refused, memory is used unpinned,
    and `refusal` says why.
    """

    def __init__(self, pinning: CudaPinning, *, threads: int = 0) -> None:
        self._pinning = pinning
        self._threads = threads or min(THREADS, len(os.sched_getaffinity(0)))
        self._segments: list[Segment] = []
        self._making: list[Future[Segment]] = []
        self._free: list[tuple[int, int, int]] = []  # (segment, start, end); sorted, no two adjacent
        self.size = 0  # bytes, with segments that are still being made

    def reserve(self, nbytes: int, group: ProcessGroup | None = None) -> None:
        missing = max(nbytes - self.size, 0)
        _require_room(missing, group)  # touching too much would kill this process or another
        if not missing:
            return
        count = min(max(self._threads, -(-missing // SEGMENT)), -(-missing // SMALLEST_SEGMENT))
        each = -(-missing // count // mmap.PAGESIZE) * mmap.PAGESIZE
        workers = ThreadPoolExecutor(self._threads, thread_name_prefix="corerl-pin")
        self._making += [workers.submit(self._make, each) for _ in range(count)]
        workers.shutdown(wait=False)  # the threads end when all segments are made
        self.size += count * each

    def take(self, nbytes: int) -> list[Piece]:
        self._collect()
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if (missing := nbytes - sum(end - start for _, start, end in self._free)) > 0:
            self.reserve(self.size + missing)
            self._collect()
        pieces = []
        while nbytes:
            segment, start, end = self._free.pop(0)
            stop = min(end, start + nbytes)
            pieces.append(Piece(segment, start, self._segments[segment].memory[start:stop]))
            nbytes -= stop - start
            if stop < end:
                self._free.insert(0, (segment, stop, end))
        return pieces

    def give_back(self, pieces: Iterable[Piece]) -> None:
        freed = [(piece.segment, piece.start, piece.start + piece.memory.numel()) for piece in pieces]
        self._free = list(_joined(sorted([*self._free, *freed])))

    def close(self) -> None:
        """Unpin everything, after waiting for segments that are still being made."""
        making = [future for future in self._making if not future.cancel()]
        made = [future.result() for future in making if future.exception() is None]
        for segment in [*self._segments, *made]:
            if not segment.refusal:
                self._pinning.unpin(segment.memory)
        self._segments, self._making, self._free, self.size = [], [], [], 0

    def _make(self, nbytes: int) -> Segment:
        """Make one segment. Runs in a thread: numpy and the driver release the GIL."""
        memory = _touched(nbytes)
        reason = self._pinning.pin(memory)
        return Segment(memory, reason)

    def _collect(self) -> None:
        """Wait for segments in the making. Forgets those that failed, and raises the first error."""
        making, self._making = self._making, []
        failed: BaseException | None = None
        for future in making:
            if (error := future.exception()) is not None:
                failed = failed or error
                continue
            segment = future.result()
            self.refusal = self.refusal or _refusal(segment.refusal)
            self._free.append((len(self._segments), 0, segment.memory.numel()))
            self._segments.append(segment)
        if failed is not None:
            self.size = sum(segment.memory.numel() for segment in self._segments)
            raise failed


def host_memory(device: torch.device) -> HostMemory:
    """Host memory for copies of what is on `device`."""
    return PinnedPool(CudaPinning(device)) if device.type == "cuda" else HostMemory()


def cut(pieces: Sequence[Piece], sizes: Iterable[int]) -> Iterator[list[torch.Tensor]]:
    """Cut `pieces`, from the beginning, into memory for each of `sizes`: a list of [n] uint8 slices."""
    rest = [piece.memory for piece in reversed(pieces)]
    for size in sizes:
        slices = []
        while size:
            memory = rest.pop()
            slices.append(memory[:size])
            if memory.numel() > size:
                rest.append(memory[size:])
            size -= slices[-1].numel()
        yield slices


def available_bytes() -> float:
    """Bytes of host memory that can be taken without swapping, within the container's limit."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return math.inf  # not Linux
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        most, used, stat = ((CONTAINER / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
    except OSError:
        return free  # not in a container, or cgroups v1
    if most.strip() == "max":
        return free
    files = sum(int(line.split()[1]) for line in stat.splitlines() if line.startswith(("active_file", "inactive_file")))
    return min(free, max(int(most) - int(used) + files, 0))  # the file cache can be reclaimed


def _require_room(nbytes: int, group: ProcessGroup | None) -> None:
    """Raise MemoryError on each rank of a host that has less memory than its ranks ask for."""
    mine = (socket.gethostname(), nbytes, available_bytes())
    asked = [mine]
    if group is not None and group.size() > 1:
        # Every rank reads its host's free memory before any takes some.
        asked = all_gather_json(mine, group)
    here = [(wanted, free) for host, wanted, free in asked if host == mine[0]]
    total, available = sum(wanted for wanted, _ in here), min(free for _, free in here)
    if total <= available:
        return
    raise MemoryError(
        f"what sleeps, and snapshots, need {total / 2**30:.2f} GiB more host memory"
        f"{f' for {len(here)} ranks' * (len(here) > 1)}, but the host has {available / 2**30:.2f} GiB left; put fewer "
        "ranks on a node, or engines on separate devices (cluster.placement = 'disaggregated'), so that ranks need not "
        "sleep"
    )


def _touched(nbytes: int) -> torch.Tensor:
    """[nbytes] uint8 zeros, with all pages faulted in."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
        pages.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(pages, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
    return torch.frombuffer(pages, dtype=torch.uint8)


def _refusal(reason: str) -> str:
    if not reason:
        return ""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:g} MiB"
    return f"host memory could not be pinned ({reason}; `ulimit -l` is {limit}); sleep and wake_up will be slow"


def _joined(extents: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """The sorted extents, with adjacent ones merged."""
    last: tuple[int, int, int] | None = None
    for segment, start, end in extents:
        if last is not None and last[0] == segment and last[2] == start:
            last = (segment, last[1], end)
            continue
        if last is not None:
            yield last
        last = (segment, start, end)
    if last is not None:
        yield last
