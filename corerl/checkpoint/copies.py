"""Copy a rank's part of a checkpoint, beside training, into files in memory that are written over again and again.

A file is made once, mapped and, if its contents come from a GPU, pinned: the device writes into it, and nothing is
written a second time. Whoever calls makes two sets of files take turns: one is complete while the other is written.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from attrs import frozen

from corerl.checkpoint.format import RankIndex, index_file, tensor_file, write_index
from corerl.checkpoint.sums import threads_here
from corerl.checkpoint.writer import STORED, BackgroundWriter, boxes_of, plain, with_sums
from corerl.errors import SaveFailed
from corerl.messages import message_of
from corerl.weights.chunks import Chunk
from corerl.weights.files import free_in
from corerl.weights.shared import CudaPinning

MEMORY = Path("/dev/shm")
DTYPES = {  # by their names in safetensors
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Shape: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # where to, and from where
SEGMENT = 2**30  # bytes whose pages one thread touches


def memory_of(what: str) -> Path:
    """The directory in memory for what a run, or whatever has this name, keeps there: the same each time."""
    known = hashlib.sha256(os.fsencode(what)).hexdigest()[:16]
    return MEMORY / f"corerl-{os.getuid()}-{known}"


def _nothing() -> None:
    pass


class Copying(Protocol):
    """Copies tensors to the host."""

    def begin(self, pairs: Sequence[Pair]) -> Callable[[], None]:
        """Copy each second tensor into the first. Returns what waits, in any thread, until all are there: until then
        nothing may write to the second ones."""


class CopyingOnHost:
    """At once."""

    def begin(self, pairs: Sequence[Pair]) -> Callable[[], None]:
        for target, source in pairs:
            target.copy_(source)
        return _nothing


class CopyingFromGpu:
    """On a stream of its own, beside the kernels that are launched from now on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def begin(self, pairs: Sequence[Pair]) -> Callable[[], None]:
        """Raises SaveFailed, with nothing under way, if there is no memory for a tensor in another dtype or order."""
        self._stream = self._stream or torch.cuda.Stream(self._device)
        torch.cuda.synchronize(self._device)  # kernels on any stream may still write what is copied
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                try:
                    target.copy_(source, non_blocking=True)
                except torch.OutOfMemoryError as error:
                    self._stream.synchronize()
                    raise SaveFailed(f"cannot copy to memory: {message_of(error)}") from error
            # A thread that waits for it sleeps: the rank's own needs the core.
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
        held = list(pairs)  # what is copied may have been made for that

        def wait() -> None:
            torch.cuda.set_device(self._device)  # a new thread is at device 0 and would create a context there
            done.synchronize()
            held.clear()

        return wait


@frozen(eq=False)
class Layout:
    """Where tensors lie in a safetensors file."""

    header: bytes
    starts: Mapping[str, int]  # the first byte of each tensor
    shapes: Mapping[str, Shape]
    nbytes: int  # of the file

    @classmethod
    def of(cls, shapes: Mapping[str, Shape]) -> Layout:
        """Raises SaveFailed for a dtype that safetensors has not."""
        entries: dict[str, Any] = {}
        starts: dict[str, int] = {}
        at = 0
        # Wider elements first, so that each begins at a multiple of its size, as safetensors itself sorts them.
        for name in sorted(shapes, key=lambda name: -shapes[name][0].itemsize):
            dtype, shape = shapes[name]
            if dtype not in DTYPES:
                raise SaveFailed(f"{name!r} is of {dtype}, which cannot be saved; keep it in another dtype")
            end = at + dtype.itemsize * math.prod(shape)
            entries[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (at, end)}
            starts[name], at = at, end
        text = json.dumps(entries, separators=(",", ":")).encode()
        # Filled up with spaces, so that the tensors begin with a page.
        length = -(-(8 + len(text)) // mmap.PAGESIZE) * mmap.PAGESIZE - 8
        header = length.to_bytes(8, "little") + text.ljust(length)
        return cls(
            header, {name: len(header) + start for name, start in starts.items()}, dict(shapes), len(header) + at
        )

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each tensor as a view of the file's bytes [nbytes]."""
        return {
            name: memory[start : start + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
            for name, start in self.starts.items()
            for dtype, shape in (self.shapes[name],)
        }


@frozen(eq=False)
class Mapped:
    """A file that is mapped to memory. It stays open, so that no other file can have its number."""

    descriptor: int
    memory: torch.Tensor  # [n] uint8
    unpin: Callable[[], None]

    @classmethod
    def open(cls, path: Path, nbytes: int, pinning: CudaPinning | None) -> Mapped:
        """Map the file at `path`, or a new one in its place if it has not this size."""
        descriptor = _opened(path, nbytes)
        try:
            memory = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
            if pinning is None:
                return cls(descriptor, memory, _nothing)
            _touch(memory)
            # Where pinning is refused copies take several times as long, and are as good.
            refused = pinning.pin_apart(memory)
            return cls(descriptor, memory, _nothing if refused else lambda: pinning.unpin(memory))
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def removed(self) -> bool:
        return not os.fstat(self.descriptor).st_nlink

    def is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self.descriptor), path.lstat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """The memory goes with its last view."""
        self.unpin()
        os.close(self.descriptor)


def _opened(path: Path, nbytes: int) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        pass
    else:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_size == nbytes:
            return descriptor
        os.close(descriptor)
        path.unlink()  # never shortened: whoever still has it mapped would be ended by SIGBUS
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # All of it now: a page that finds no room when it is first written to ends the process by SIGBUS.
        os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor


def _touch(memory: torch.Tensor) -> None:
    """Map each page, by several threads: pinning does so one by one."""
    bytes_ = memory.numpy()

    def touch(start: int) -> None:
        bytes_[start : start + SEGMENT : mmap.PAGESIZE] = 0

    with ThreadPoolExecutor(threads_here()) as pool:
        list(pool.map(touch, range(0, len(bytes_), SEGMENT)))


class StateCopies:
    """The copies that one rank makes, one at a time."""

    def __init__(
        self,
        device: torch.device,
        *,
        copying: Copying | None = None,
        run: Callable[[Callable[[], object]], object] = lambda job: job(),
    ) -> None:
        """`run` is called in a background thread, to run what remains to be done there."""
        on_gpu = device.type == "cuda"
        self._pinning = CudaPinning(device) if on_gpu else None
        self._copying = copying or (CopyingFromGpu(device) if on_gpu else CopyingOnHost())
        self._writer = BackgroundWriter(run)
        self._mapped: list[Mapped] = []
        self._read: Callable[[], None] = _nothing

    def begin(self, directory: Path, rank: int, state: Mapping[str, Sequence[Chunk]], extra: Mapping[str, Any]) -> int:
        """Begin to copy this rank's chunks into `directory`, a role's part of a checkpoint, as `write` would write
        them; returns bytes. Returns when nothing but what is on a GPU remains to be read, for which `settle` waits.
        The index is removed first and written last, once all values are summed and known to be finite: with it
        everything is there. Raises SaveFailed, also if the copy before failed."""
        self._writer.wait()
        views, boxes = boxes_of(state)
        tensors: dict[str, torch.Tensor] = {}
        index = RankIndex(boxes=boxes, extra=plain(extra, tensors, "extra"))
        layout = Layout.of(
            {
                **{name: (STORED, tuple(view.shape)) for name, view in views.items()},
                **{name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()},
            }
        )
        path = directory / tensor_file(rank)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / index_file(rank)).unlink(missing_ok=True)
            memory = self._map(path, layout.nbytes)
        except OSError as error:
            raise SaveFailed(f"cannot make {path}: {error}{free_in(layout.nbytes, path, error)}") from error
        memory[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        copied = layout.views(memory)
        self._read = read = self._copying.begin([(copied[name], each) for name, each in {**views, **tensors}.items()])
        threads = threads_here()

        def complete() -> None:
            read()
            write_index(directory, rank, with_sums(index, copied, threads))

        self._writer.submit(complete)
        return layout.nbytes

    def settle(self) -> None:
        """Wait until the state may change again."""
        self._read()
        self._read = _nothing

    def complete(self, *, wait: bool) -> bool:
        """Whether the last copy is complete; `wait` blocks until it is, and gives back the memory of files that were
        removed. Raises SaveFailed if it failed."""
        if wait:
            try:
                self._writer.wait()
            finally:
                self._close_removed()
        return self._writer.idle()

    def close(self) -> None:
        """Let the last copy be completed, and give the memory back. Raises SaveFailed if it failed."""
        try:
            self._writer.close()
        finally:
            self._close(self._mapped)
            self._mapped = []

    def _map(self, path: Path, nbytes: int) -> torch.Tensor:
        """The bytes of the file at `path`, [nbytes]."""
        self._close_removed()  # theirs is room for new ones
        for each in self._mapped:
            if each.memory.numel() == nbytes and each.is_at(path):
                return each.memory
        self._mapped.append(Mapped.open(path, nbytes, self._pinning))
        return self._mapped[-1].memory

    def _close_removed(self) -> None:
        removed = [each for each in self._mapped if each.removed]
        self._mapped = [each for each in self._mapped if each not in removed]
        self._close(removed)

    @staticmethod
    def _close(mapped: Iterable[Mapped]) -> None:
        for each in mapped:
            each.close()
