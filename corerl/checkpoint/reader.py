"""Read a checkpoint box by box: each rank reads exactly its part, whatever parallelism wrote it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from corerl.checkpoint.format import SavedBox, checksum, index_file, read_index, tensor_file, unusable
from corerl.errors import CheckpointDamaged, CheckpointError
from corerl.weights.chunks import intersect, within


class CheckpointSource:
    """A `TensorSource`, in float32, for some keys (master, exp_avg, exp_avg_sq, buffer) of one role's part; a tensor
    has one of them. Raises CheckpointError if the first key is not there."""

    def __init__(self, role_dir: str | Path, *wanted: str) -> None:
        self._directory = Path(role_dir)
        self.shapes: dict[str, tuple[int, ...]] = {}  # of every tensor of these keys, by name
        self._boxes: dict[str, list[tuple[int, SavedBox]]] = {}  # name -> (rank that wrote it, box)
        self._writers = written_ranks(self._directory)
        self._files: dict[int, Any] = {}  # open files by rank; opening maps the file and reads its header
        self._sums: dict[tuple[int, str], int] = {}  # of tensors not verified yet: (rank, stored name) -> checksum
        self.bytes_read = 0
        keys = set()
        for rank in range(self._writers):
            index = read_index(self._directory, rank)
            self._sums |= {(rank, stored): value for stored, value in index.sums.items()}
            for saved in index.boxes:
                keys.add(saved.key)
                if saved.key in wanted:
                    self.shapes[saved.name] = saved.shape
                    self._boxes.setdefault(saved.name, []).append((rank, saved))
        if wanted[0] not in keys:
            raise CheckpointError(f"{role_dir} has no {wanted[0]!r}; it has {', '.join(sorted(keys)) or 'nothing'}")

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.shapes.get(name)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Read one box [*sizes], float32 on the CPU. Raises CheckpointError if the files do not hold all of it, or if a
        written box that it is part of is damaged, or has a value that is not finite."""
        wanted = (tuple(offsets), tuple(sizes))
        out = torch.empty(wanted[1])
        found = 0
        for rank, saved in self._boxes[name]:
            common = intersect(wanted, saved.box)
            if common is None:
                continue
            values = self._slice(rank, saved, within(common, saved.box), whole=common == saved.box)
            self.bytes_read += values.numel() * values.element_size()
            if common == wanted:
                return values
            out[within(common, wanted)] = values
            found += values.numel()
        if found != math.prod(wanted[1]):
            raise CheckpointDamaged(
                f"{self._directory} contains {found} of the {math.prod(wanted[1])} elements of {name!r} at "
                f"offsets {list(wanted[0])}; the checkpoint is damaged, so resume from another one"
            )
        return out

    def verify(self, *, rank: int, world_size: int) -> None:
        """Read this rank's part of the boxes that were written, but for those that it has read whole before, and so
        verified. Called by every rank once it has read what it needs: then each box has been verified by one, also
        where all ranks need only parts of it. Raises CheckpointDamaged."""
        numbers = [0] * self._writers
        for boxes in self._boxes.values():
            for writer, saved in boxes:
                # With as many ranks as wrote, each has mostly read what it wrote itself.
                readers = range(writer % world_size, world_size, self._writers)
                mine = readers[numbers[writer] % len(readers)] == rank
                numbers[writer] += 1
                if mine and (writer, saved.stored) in self._sums:
                    self._slice(writer, saved, (), whole=True)

    def _slice(self, rank: int, saved: SavedBox, slices: tuple[slice, ...], *, whole: bool) -> torch.Tensor:
        path = self._directory / tensor_file(rank)
        with _reading(path):
            if rank not in self._files:
                self._files[rank] = _opened(path)
            handle = self._files[rank]
            # A part alone has no checksum: `verify` reads the whole.
            expected = self._sums.pop((rank, saved.stored), None) if whole else None
            if expected is not None:
                all_of_it = handle.get_tensor(saved.stored)
                require_sound(all_of_it, saved, expected, path)
                return all_of_it
            # A tensor without dims has nothing to slice.
            values: torch.Tensor = handle.get_slice(saved.stored)[slices] if slices else handle.get_tensor(saved.stored)
        return values


def require_sound(tensor: torch.Tensor, saved: SavedBox, expected: int, path: Path) -> None:
    """Raise CheckpointError unless a tensor is the box that was saved, with this checksum and finite values."""
    what = f"{path}: {saved.key!r} of {saved.name!r}"
    if tuple(tensor.shape) != saved.sizes:
        raise CheckpointDamaged(
            f"{what} has shape {list(tensor.shape)}, but its index says {list(saved.sizes)}; the checkpoint is "
            "damaged, so resume from another one"
        )
    if not _same(tensor, expected, what):
        raise CheckpointDamaged(f"{what} has NaN or infinite values; resume from a checkpoint of an earlier step")


def _same(tensor: torch.Tensor, expected: int | None, what: str) -> bool:
    """Whether a tensor, which is what was saved, has only finite values. Raises CheckpointDamaged if it is not."""
    crc32, finite = checksum(tensor)
    if crc32 != expected:
        raise CheckpointDamaged(f"{what} is not what was saved (its checksum differs); resume from another checkpoint")
    return finite


def written_ranks(role_dir: str | Path) -> int:
    """How many ranks wrote this role's part. Raises CheckpointError if none did."""
    directory = Path(role_dir)
    ranks = 0
    while (directory / index_file(ranks)).exists():
        ranks += 1
    if not ranks:
        raise unusable(
            directory.parent, f"{directory} is not a role's part of a checkpoint: {index_file(0)} is missing"
        )
    return ranks


def read_extra(role_dir: str | Path, rank: int) -> dict[str, Any]:
    """The extra state that `rank` staged, with tensors on the CPU. Raises CheckpointError if there is no such rank."""
    directory = Path(role_dir)
    index = read_index(directory, rank)
    path = directory / tensor_file(rank)
    with _reading(path):
        with _opened(path) as handle:

            def sound(stored: str) -> torch.Tensor:
                # Not the file's own memory, which would be kept as long as the tensor.
                tensor: torch.Tensor = handle.get_tensor(stored).clone()
                _same(tensor, index.sums.get(stored), f"{path}: {stored!r}")
                return tensor

            extra: dict[str, Any] = revived(index.extra, sound)
    return extra


def _opened(path: Path) -> Any:
    path.open("rb").close()  # safe_open takes any error for a missing file
    return safe_open(path, framework="pt")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Run a block that reads a rank's file of a checkpoint. Raises CheckpointError for any error in it."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # OSError, or the safetensors library's own
        text = f"{path} cannot be read ({error}); resume from another checkpoint"
        raise unusable(path.parent.parent, text) from error


def revived(value: Any, tensor_named: Callable[[str], torch.Tensor]) -> Any:
    """What `corerl.checkpoint.writer.plain` made plain, with its tensors."""
    match value:
        case {"tensor": str() as stored, **rest} if not rest:
            return tensor_named(stored)
        case dict():
            return {key: revived(item, tensor_named) for key, item in value.items()}
        case list():
            return [revived(item, tensor_named) for item in value]
    return value
