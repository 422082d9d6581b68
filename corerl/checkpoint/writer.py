"""Stage one rank's part of a checkpoint on the host, and write it to disk, now or in the background."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

import torch
from attrs import evolve, frozen

from corerl.checkpoint.format import (
    RankIndex,
    SavedBox,
    checksums,
    publish,
    room_for,
    stored_name,
    temporary_name,
    tensor_file,
    write_index,
    write_tensors,
)
from corerl.errors import SaveFailed
from corerl.messages import message_of
from corerl.weights.chunks import Chunk

Job: TypeAlias = Callable[[], object]

MEMORY = Path("/dev/shm")  # a file system in memory
OWN = f"corerl-{os.getuid()}-"  # begins the names of CoreRL's own directories there

STORED = torch.float32
BLOCK = 2**29  # bytes
UNTOUCHED = "complete checkpoints are untouched"


def memory_of(run_dir: Path) -> Path:
    """The directory for a run's in-memory checkpoints: the same each time, so that what a killed run left is found."""
    known = hashlib.sha256(os.fsencode(run_dir.absolute())).hexdigest()[:16]
    return MEMORY / f"{OWN}{known}"


def in_memory(path: str | Path) -> bool:
    """Whether this is in a directory of `memory_of`. A run's own may be in /dev/shm too: its saves count as on disk."""
    return str(path).startswith(str(MEMORY / OWN))


@frozen(eq=False)
class Staged:
    """Host copies of a rank's state, independent of further training."""

    tensors: dict[str, torch.Tensor]
    index: RankIndex

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def stage(state: Mapping[str, Sequence[Chunk]], extra: Mapping[str, Any]) -> Staged:
    """Copy this rank's chunks (key -> chunks, skipping replicas) as float32, and `extra`: mappings, sequences, tensors
    and plain values. Blocks until the copies are done. Raises SaveFailed for a value that JSON cannot hold."""
    views: dict[str, torch.Tensor] = {}
    boxes: list[SavedBox] = []
    for key, chunks in state.items():
        for chunk in chunks:
            if chunk.replica:
                continue
            stored = stored_name(key, chunk.name, chunk.offsets)
            boxes.append(SavedBox(key, chunk.name, chunk.shape, chunk.offsets, chunk.sizes, stored))
            if stored in views:
                raise SaveFailed(f"two chunks of this rank contain {stored!r}; mark one of them as a replica")
            views[stored] = chunk.view.detach()
    on_device = {name: view for name, view in views.items() if view.device.type == "cuda"}
    pinned = dict(zip(on_device, rooms([view.numel() * STORED.itemsize for view in on_device.values()]), strict=True))
    tensors = {
        name: (
            pinned[name].view(STORED).view(view.shape) if name in pinned else torch.empty(view.shape, dtype=STORED)
        ).copy_(view, non_blocking=True)
        for name, view in views.items()
    }
    for device in {view.device for view in on_device.values()}:
        torch.cuda.synchronize(device)
    return Staged(tensors, RankIndex(boxes=boxes, extra=plain(extra, tensors, "extra")))


def with_sums(index: RankIndex, tensors: Mapping[str, torch.Tensor]) -> RankIndex:
    """The index with the checksum of every tensor. Raises SaveFailed if a box has values that are not finite, from
    which nothing could be resumed."""
    found = checksums(tensors)
    for box in index.boxes:
        _, sound = found[box.stored]
        if not sound:
            raise SaveFailed(
                f"{box.key!r} of {box.name!r} has NaN or infinite values, so nothing is saved; {UNTOUCHED}: "
                "resume from one, if there is one, with the extension nan-guard to find the cause"
            )
    return evolve(index, sums={name: crc32 for name, (crc32, _) in found.items()})


def write(staged: Staged, directory: Path, rank: int) -> int:
    """Write to `directory`, a role's part of a partial checkpoint; returns the bytes written. Raises SaveFailed.

    The index is written last: if it exists, so do the tensors.
    """
    path = directory / tensor_file(rank)
    temporary = temporary_name(path)
    index = with_sums(staged.index, staged.tensors)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_tensors(staged.tensors, temporary)
        publish(temporary, path)
        return path.stat().st_size + write_index(directory, rank, index)
    except Exception as error:  # OSError, or the safetensors library's own
        with contextlib.suppress(OSError):  # what fills the disk counts as used; without an index it is part of nothing
            temporary.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        room = room_for(staged.bytes, path, error)
        raise SaveFailed(f"cannot write {path}: {error}{room}; {UNTOUCHED}") from error


class BackgroundWriter:
    """Runs one job at a time in a background thread. A failure is kept, and raised once, by the next call.

    `run` is called in that thread to run the job.
    """

    def __init__(self, run: Callable[[Job], object] = lambda job: job()) -> None:
        self._run = run
        self._last: Future[object] | None = None  # the job whose end nobody has seen

    def submit(self, job: Job) -> None:
        """Start `job` after the previous one has ended. If that failed, raises SaveFailed and starts nothing."""
        self.wait()
        last = self._last = Future()

        def work() -> None:
            try:
                last.set_result(self._run(job))
            except BaseException as error:
                last.set_exception(error)

        # A daemon, so that a hanging disk does not keep the process alive; what it leaves half-written stays invisible.
        threading.Thread(target=work, name="checkpoint-writer", daemon=True).start()

    def wait(self) -> None:
        """Wait until nothing is in flight. Raises SaveFailed if the last job failed."""
        last, self._last = self._last, None
        if last is not None and (error := last.exception()) is not None:
            raise SaveFailed(f"the background save failed: {message_of(error)}") from error

    def idle(self) -> bool:
        """Whether nothing is in flight. Raises SaveFailed if the last job failed."""
        if self._last is not None and not self._last.done():
            return False
        self.wait()
        return True

    def close(self) -> None:
        """Let the last job finish. Raises SaveFailed if it failed."""
        self.wait()


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def rooms(
    sizes: Sequence[int], *, block_bytes: int = BLOCK, allocate: Callable[[int], torch.Tensor] = _pinned
) -> list[torch.Tensor]:
    """Memory for copies of `sizes` bytes, each a multiple of 4, cut from (pinned) blocks of `allocate`.

    torch rounds each pinned allocation up to a power of two, and keeps it for the next save. Allocating tensor by
    tensor could therefore take up to twice the bytes saved.
    """
    blocks: list[torch.Tensor] = []
    used: list[int] = []
    found: dict[int, torch.Tensor] = {}
    left = sum(sizes)
    # Largest first, each into the first block with room: the smaller ones fill the gaps.
    for index in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        size = sizes[index]
        block = next((at for at, full in enumerate(used) if len(blocks[at]) - full >= size), len(blocks))
        if block == len(blocks):
            blocks.append(allocate(1 << (max(size, min(left, block_bytes), 1) - 1).bit_length()))
            used.append(0)
        found[index] = blocks[block][used[block] : used[block] + size]
        used[block] += size
        left -= size
    return [found[index] for index in range(len(sizes))]


def plain(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    """Convert `value` to JSON data; tensors are moved to `tensors` and replaced by their names."""
    match value:
        case torch.Tensor():
            stored = f"extra/{sum(name.startswith('extra/') for name in tensors)}"
            tensors[stored] = value.detach().to("cpu", copy=True).contiguous()
            return {"tensor": stored}
        case Mapping():
            if set(value) == {"tensor"} or not all(isinstance(key, str) for key in value):
                raise SaveFailed(
                    f"{where} is a mapping with non-string keys, or with 'tensor' as its only key; rename its keys"
                )
            return {key: plain(item, tensors, f"{where}[{key!r}]") for key, item in value.items()}
        case list() | tuple():
            return [plain(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]
        case None | bool() | int() | float() | str():
            return value
    raise SaveFailed(f"{where} is a {type(value).__name__}; a checkpoint can contain only plain data and tensors")
