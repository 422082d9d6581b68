"""The training checkpoint's format on disk: names, JSON, checksums, and durable writes.

    RUN/checkpoints/step-00000050/
      checkpoint.json              written last, by the driver: format, the driver's state, sizes and sums of files
      ROLE/rank-00000.safetensors  float32 boxes of HF tensors, `exp_avg/model.norm.weight@0`; extra tensors, `extra/3`
      ROLE/rank-00000.json         the index: which box of which tensor of which key; extra state

A directory `step-*.partial` is being written, or was abandoned.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import uuid
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from attrs import asdict, field, frozen

from corerl.errors import CheckpointDamaged, CheckpointError
from corerl.messages import short_repr
from corerl.weights.chunks import Box

if TYPE_CHECKING:
    import torch  # slow to import: whoever only asks which checkpoints there are waits for it otherwise

PIECE = 2**24  # bytes from one call to the next: each takes the interpreter's lock, for which the rank's kernels wait
THREADS = 8  # at most: a few read memory as fast as all cores would
Checksum: TypeAlias = tuple[int, bool]  # the CRC-32 of a tensor's bytes; whether all values are finite

FORMAT = "corerl-checkpoint-2"
DRIVER_FILE = "checkpoint.json"
TENSORS = ".safetensors"
BUFFER = "buffer"  # the key of weights that no optimizer steps, which have no moments
WEIGHTS = ("master", BUFFER)  # the keys of all weights of a model
PARTIAL = ".partial"
KEPT = "the run that writes there keeps only its newest checkpoints (checkpoint.keep)"
REPLACED = ".replaced"  # an earlier checkpoint of the same step, while it is being replaced


@frozen
class SavedBox:
    """One box of one HF tensor in a rank's file."""

    key: str  # master, exp_avg, exp_avg_sq, buffer
    name: str
    shape: tuple[int, ...] = field(converter=tuple[int, ...])  # of the whole HF tensor
    offsets: tuple[int, ...] = field(converter=tuple[int, ...])
    sizes: tuple[int, ...] = field(converter=tuple[int, ...])
    stored: str  # its name in the safetensors file

    @property
    def box(self) -> Box:
        return self.offsets, self.sizes


@frozen(kw_only=True)
class RankIndex:
    """The index of what one rank wrote."""

    boxes: list[SavedBox]
    extra: Any  # plain data; a tensor is {"tensor": its name in the safetensors file}
    sums: Mapping[str, int] = field(factory=dict)  # the CRC-32 of each tensor in the safetensors file, by its name


def stored_name(key: str, name: str, offsets: tuple[int, ...]) -> str:
    return f"{key}/{name}@{','.join(map(str, offsets))}"


def tensor_file(rank: int) -> str:
    return f"rank-{rank:05d}{TENSORS}"


def index_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def checkpoints_dir(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


def step_dir(run_dir: str | Path, step: int) -> Path:
    return checkpoints_dir(run_dir) / f"step-{step:08d}"


def write_json(path: Path, data: Mapping[str, Any]) -> int:
    """Write atomically and durably; returns the bytes written."""
    temporary = temporary_name(path)
    temporary.write_text(json.dumps(data))
    publish(temporary, path)
    return path.stat().st_size


def temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def publish(temporary: Path, path: Path) -> None:
    """Rename a finished file or directory to its final name, durably (with fsync)."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_index(role_dir: Path, rank: int, index: RankIndex) -> int:
    return write_json(role_dir / index_file(rank), {"format": FORMAT, **asdict(index)})


def read_index(role_dir: Path, rank: int) -> RankIndex:
    """Raises CheckpointError if the file is missing, damaged or of another format."""
    file = role_dir / index_file(rank)
    content = read_json(file, checkpoint=role_dir.parent)
    boxes = [SavedBox(**box) for box in content["boxes"]]
    return RankIndex(boxes=boxes, extra=content["extra"], sums=content["sums"])


def checksum_of_json(content: Mapping[str, Any]) -> int:
    """The CRC-32 of parsed JSON, written without spaces and with sorted keys; its field `crc32` is left out."""
    rest = {name: value for name, value in content.items() if name != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def read_json(path: Path, *, checkpoint: Path) -> dict[str, Any]:
    """Read a JSON file of `checkpoint`. Raises CheckpointError if it is missing, damaged or of another format."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise unusable(
            checkpoint, f"{path} is missing; the checkpoint is incomplete, so resume from another one"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise unusable(checkpoint, f"{path} cannot be read ({error}); resume from another checkpoint") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has format {short_repr(found, 40)}, but this CoreRL reads {FORMAT!r}; resume with the version of "
            "CoreRL that wrote it, or from another checkpoint"
        )
    assert isinstance(content, dict)
    return content


def unusable(checkpoint: Path, text: str) -> CheckpointDamaged:
    """The error with `text` about a file of `checkpoint`, or another one if the whole checkpoint is gone by now."""
    if os.path.isdir(checkpoint):
        return CheckpointDamaged(text)
    return CheckpointDamaged(f"{checkpoint} was removed or replaced while it was being read: {KEPT}; try again")


# ---- checksums of tensors --------------------------------------------------------------------------------------------


def checksum(tensor: torch.Tensor) -> Checksum:
    """Read each value of a CPU tensor once. Only float32 values are checked to be finite."""
    import torch

    data: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    crc32, sound = 0, True
    with np.errstate(invalid="ignore"):
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            crc32 = zlib.crc32(piece, crc32)
            if tensor.dtype == torch.float32 and sound:
                values = piece.view(np.float32)
                # NaN anywhere makes both ends NaN. Intermediate results would take memory, and more time.
                sound = math.isfinite(values.min()) and math.isfinite(values.max())
    return crc32, sound


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, Checksum]:
    """The same for each tensor, in threads: zlib and numpy let others run."""
    import torch

    # As many as torch may use, which is this process's part of the host's cores.
    threads = max(1, min(torch.get_num_threads(), THREADS))
    # The largest ones first: begun last, one would keep a single thread busy while the others have nothing left.
    names = sorted(tensors, key=lambda name: -tensors[name].numel())
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-sums") as pool:
        found = dict(zip(names, pool.map(checksum, (tensors[name] for name in names)), strict=True))
    return {name: found[name] for name in tensors}


# ---- files of tensors ------------------------------------------------------------------------------------------------


FULL = (errno.ENOSPC, errno.EDQUOT)
GIB = 2**30


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, *, metadata: dict[str, str] | None = None) -> None:
    """Write the file with the mode that the umask gives: safetensors lets nobody but its owner read it. Raises OSError,
    or what safetensors raises."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=metadata)
    if path.stat().st_mode != mode:  # some mounts, whose modes are their own, refuse to be asked
        path.chmod(mode)


def room_for(nbytes: int, path: Path, error: Exception) -> str:
    """If `error`, of writing `nbytes` to `path`, says that the disk is full: what is needed and what is free."""
    numbers = [each for each in FULL if getattr(error, "errno", None) == each or f"(os error {each})" in str(error)]
    if not numbers:
        return ""
    there = next(each for each in path.absolute().parents if each.exists())
    if errno.EDQUOT in numbers:  # what the disk has free is not all yours
        room = f"are needed in {there}, more than is left of the quota"
    else:
        room = f"are needed and {shutil.disk_usage(there).free / GIB:.3g} GiB free in {there}"
    return f"; {nbytes / GIB:.3g} GiB {room}: free disk space, or set another run.dir, then resume"
