"""The training checkpoint's format on disk: names, JSON, and durable writes.

    RUN/checkpoints/step-00000050/
      checkpoint.json              written last, by the driver: format, the driver's state, sizes and sums of files
      ROLE/rank-00000.safetensors  float32 boxes of HF tensors, `exp_avg/model.norm.weight@0`; extra tensors, `extra/3`
      ROLE/rank-00000.json         the index: which box of which tensor of which key; extra state

A directory `step-*.partial` is being written, or was abandoned.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

from corerl.errors import CheckpointDamaged, CheckpointError
from corerl.messages import short_repr
from corerl.weights.chunks import Box

FORMAT = "corerl-checkpoint-2"
DRIVER_FILE = "checkpoint.json"
TENSORS = ".safetensors"
BUFFER = "buffer"  # the key of weights that no optimizer steps, which have no moments
WEIGHTS = ("master", BUFFER)  # the keys of all weights of a model
PARTIAL = ".partial"
KEPT = "the run that writes there keeps only its newest checkpoints (checkpoint.keep)"
JSON_NAMES = {dict: "an object", list: "a list", str: "a string", int: "an integer", float: "a finite number"}
REPLACED = ".replaced"  # an earlier checkpoint of the same step, while it is being replaced


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@frozen
class SavedBox:
    """One box of one HF tensor in a rank's file."""

    key: str  # master, exp_avg, exp_avg_sq, buffer
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
    require_fields(content, {"boxes": list, "extra": dict, "sums": dict}, where=str(file))
    boxes = [_box(fields, f"{file}: boxes[{number}]") for number, fields in enumerate(content["boxes"])]
    require_fields(content["sums"], {box.stored: int for box in boxes}, where=f"{file}: sums")
    return RankIndex(boxes=boxes, extra=content["extra"], sums=content["sums"])


def _box(fields: Any, where: str) -> SavedBox:
    texts, numbers = ("key", "name", "stored"), ("shape", "offsets", "sizes")
    require_fields(fields, {**dict.fromkeys(texts, str), **dict.fromkeys(numbers, list)}, where=where)
    entries = [fields[name] for name in numbers]
    if len({len(each) for each in entries}) > 1 or not all(type(n) is int and n >= 0 for each in entries for n in each):
        raise CheckpointError(
            f"{where} has {', '.join(f'{name}={fields[name]}' for name in numbers)}, wanted as many non-negative "
            "integers in each; resume from another checkpoint"
        )
    return SavedBox(**{name: fields[name] for name in (*texts, *numbers)})


def require_fields(content: Any, kinds: Mapping[str, type], *, where: str) -> None:
    """Raise CheckpointError unless `content` is a mapping in which each of these fields has its type. `where` names it,
    for the message."""
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{where} is a {type(content).__name__}, wanted an object; resume from another checkpoint"
        )
    for name, kind in kinds.items():
        if name not in content:
            raise CheckpointError(f"{where} lacks {name!r}; resume from another checkpoint")
        value = content[name]
        if not (_is_finite(value) if kind is float else type(value) is kind):
            found = short_repr(value, 40)
            wanted = JSON_NAMES[kind]
            raise CheckpointError(f"{where}: {name!r} is {found}, wanted {wanted}; resume from another checkpoint")


def _is_finite(value: object) -> bool:
    """Whether a JSON value is a number that a float can be; JSON also has NaN, and integers of any size."""
    return type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max  # type: ignore[operator]


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
    except (OSError, ValueError) as error:
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
