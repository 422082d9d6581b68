"""Read a checkpoint box by box: each rank reads exactly its share, whatever parallelism wrote it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from corerl.checkpoint.format import (
    SavedBox,
    checksum,
    index_file,
    read_index,
    tensor_file,
    unusable,
)
from corerl.errors import CheckpointError
from corerl.regular import require_regular
from corerl.weights.chunks import finite, intersect, within


class CheckpointSource:
    """A `TensorSource`, in float32, for one key (master, exp_avg, exp_avg_sq) of one role's part."""

    def __init__(self, role_dir: str | Path, key: str) -> None:
        self._directory = Path(role_dir)
        self._key = key
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._boxes: dict[str, list[tuple[int, SavedBox]]] = {}  # name -> (rank that wrote it, box)
        self._files: dict[int, Any] = {}  # open files by rank; opening maps the file and reads its header
        self._sums: dict[tuple[int, str], int] = {}  # of tensors not read yet: (rank, stored name) -> checksum
        self.bytes_read = 0
        keys = set()
        for rank in range(written_ranks(self._directory)):
            index = read_index(self._directory, rank)
            self._sums |= {(rank, stored): value for stored, value in index.sums.items()}
            for saved in index.boxes:
                keys.add(saved.key)
                if saved.key == key:
                    self._shapes[saved.name] = saved.shape
                    self._boxes.setdefault(saved.name, []).append((rank, saved))
        if key not in keys:
            raise CheckpointError(f"{role_dir} has no {key!r}; it has {', '.join(sorted(keys)) or 'nothing'}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of this key, by name."""
        return dict(self._shapes)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

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
            raise CheckpointError(
                f"{self._directory} contains {found} of the {math.prod(wanted[1])} elements of {name!r} at "
                f"offsets {list(wanted[0])}; the checkpoint is damaged, so resume from another one"
            )
        return out

    def _slice(self, rank: int, saved: SavedBox, slices: tuple[slice, ...], *, whole: bool) -> torch.Tensor:
        path = self._directory / tensor_file(rank)
        try:
            if rank not in self._files:
                require_regular(path)
                self._files[rank] = safe_open(path, framework="pt")
            handle = self._files[rank]
            # A part alone has no checksum: whoever resumes on other ranks has had the whole read before.
            expected = self._sums.pop((rank, saved.stored), None) if whole else None
            if expected is not None:
                all_of_it = handle.get_tensor(saved.stored)
                require_sound(all_of_it, saved, expected, path)
                return all_of_it
            # A tensor without dims has nothing to slice.
            values: torch.Tensor = handle.get_slice(saved.stored)[slices] if slices else handle.get_tensor(saved.stored)
        except CheckpointError:
            raise
        except Exception as error:  # OSError, or the safetensors library's own
            text = f"{path} cannot be read ({error}); resume from another checkpoint"
            raise unusable(self._directory.parent, text) from error
        return values


def require_sound(tensor: torch.Tensor, saved: SavedBox, expected: int, path: Path) -> None:
    """Raise CheckpointError unless a tensor is the box that was saved, with this checksum and finite values."""
    what = f"{path}: {saved.key!r} of {saved.name!r}"
    if tuple(tensor.shape) != saved.sizes:
        raise CheckpointError(
            f"{what} has shape {list(tensor.shape)}, but its index says {list(saved.sizes)}; the checkpoint is "
            "damaged, so resume from another one"
        )
    if checksum(tensor) != expected:
        raise CheckpointError(f"{what} is not what was saved (its checksum differs); resume from another checkpoint")
    if not finite(tensor):
        raise CheckpointError(f"{what} has NaN or infinite values; resume from a checkpoint of an earlier step")


def damage(role_dir: Path, rank: int) -> str | None:
    """What is wrong with a rank's part of a checkpoint; None if all of it can be read and is what was saved."""
    path = role_dir / tensor_file(rank)
    try:
        index = read_index(role_dir, rank)
        require_regular(path)
        boxes = {saved.stored: saved for saved in index.boxes}
        with safe_open(path, framework="pt") as handle:
            for stored, expected in index.sums.items():
                tensor = handle.get_tensor(stored)
                if stored in boxes:
                    require_sound(tensor, boxes[stored], expected, path)
                elif checksum(tensor) != expected:
                    return f"{path}: {stored!r} is not what was saved (its checksum differs)"
    except CheckpointError as error:
        return error.message
    except Exception as error:  # OSError, or the safetensors library's own
        return f"{path} cannot be read ({error}); resume from another checkpoint"
    return None


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
    try:
        require_regular(path)
        with safe_open(path, framework="pt") as handle:
            extra: dict[str, Any] = _revive(index.extra, handle, index.sums, path)
    except CheckpointError:
        raise
    except Exception as error:  # OSError, or the safetensors library's own
        raise unusable(directory.parent, f"{path} cannot be read ({error}); resume from another checkpoint") from error
    return extra


def _revive(value: Any, handle: Any, sums: Mapping[str, int], path: Path) -> Any:
    match value:
        case {"tensor": str() as stored, **rest} if not rest:
            tensor = handle.get_tensor(stored)
            if checksum(tensor) != sums.get(stored):
                raise CheckpointError(
                    f"{path}: {stored!r} is not what was saved (its checksum differs); resume from another checkpoint"
                )
            return tensor
        case dict():
            return {key: _revive(item, handle, sums, path) for key, item in value.items()}
        case list():
            return [_revive(item, handle, sums, path) for item in value]
    return value
