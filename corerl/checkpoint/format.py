"""The training checkpoint's format on disk: names, JSON, and durable writes.

    RUN/checkpoints/step-00000050/
      checkpoint.json              written last, by the driver: format, the driver's state, sizes of all files
      ROLE/rank-00000.safetensors  float32 boxes of HF tensors, `exp_avg/model.norm.weight@0`; extra tensors, `extra/3`
      ROLE/rank-00000.json         the index: which box of which tensor of which key; extra state

A directory `step-*.partial` is being written, or was abandoned.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

from corerl.errors import CheckpointError
from corerl.weights.chunks import Box

FORMAT = "corerl-checkpoint-1"
DRIVER_FILE = "checkpoint.json"
PARTIAL = ".partial"
KEPT = "the run that writes there keeps only its newest checkpoints (checkpoint.keep)"
REPLACED = ".replaced"  # an earlier checkpoint of the same step, while it is being replaced


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@frozen
class SavedBox:
    """One box of one HF tensor in a rank's file."""

    key: str  # master, exp_avg, exp_avg_sq
    name: str
    shape: tuple[int, ...] = field(converter=_ints)  # of the whole HF tensor
    offsets: tuple[int, ...] = field(converter=_ints)
    sizes: tuple[int, ...] = field(converter=_ints)
    stored: str  # its name in the safetensors file

    @property
    def box(self) -> Box:
        return self.offsets, self.sizes


@frozen(kw_only=True)
class RankIndex:
    """The index of what one rank wrote."""

    boxes: list[SavedBox]
    extra: Any  # plain data; a tensor is {"tensor": its name in the safetensors file}


def stored_name(key: str, name: str, offsets: tuple[int, ...]) -> str:
    return f"{key}/{name}@{','.join(map(str, offsets))}"


def tensor_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


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
    content = read_json(role_dir / index_file(rank), checkpoint=role_dir.parent)
    return RankIndex(boxes=[SavedBox(**box) for box in content["boxes"]], extra=content["extra"])


def read_json(path: Path, *, checkpoint: Path) -> dict[str, Any]:
    """Read a JSON file of `checkpoint`. Raises CheckpointError if it is missing, damaged or of another format."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise unusable(
            checkpoint, f"{path} is missing; the checkpoint is incomplete, so resume from another one"
        ) from None
    except (OSError, ValueError) as error:
        raise unusable(checkpoint, f"{path} cannot be read ({error}); resume from another checkpoint") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has format {found!r}, but this CoreRL reads {FORMAT!r}; resume from another checkpoint"
        )
    assert isinstance(content, dict)
    return content


def unusable(checkpoint: Path, text: str) -> CheckpointError:
    """The error with `text` about a file of `checkpoint`, or another one if the whole checkpoint is gone by now."""
    if os.path.isdir(checkpoint):
        return CheckpointError(text)
    return CheckpointError(f"{checkpoint} was removed or replaced while it was being read: {KEPT}; try again")
