"""The driver's side of checkpoints: begin and commit them atomically, find the newest, remove old ones."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from corerl.checkpoint.format import (
    BUFFER,
    DRIVER_FILE,
    FORMAT,
    KEPT,
    PARTIAL,
    REPLACED,
    TENSORS,
    checkpoints_dir,
    checksum_of_json,
    index_file,
    publish,
    read_index,
    read_json,
    step_dir,
    sync,
    tensor_file,
    unusable,
    write_json,
)
from corerl.errors import CheckpointDamaged, CheckpointError, SaveFailed
from corerl.messages import did_you_mean_path
from corerl.weights.chunks import Box, holes

LONGEST_HEADER = 100_000_000  # bytes that safetensors reads
Faults: TypeAlias = Mapping[Path, str]  # checkpoint -> what is wrong with it
ONE = ".../checkpoints/step-00000050"  # example for messages
NAME = re.compile(rf"step-(\d+)({re.escape(PARTIAL)}|{re.escape(REPLACED)})?")


def begin(run_dir: str | Path, step: int) -> Path:
    """Create an empty directory for the checkpoint of `step`, which `latest` ignores. Each rank writes to its role's
    subdirectory. Raises SaveFailed."""
    partial = step_dir(run_dir, step).with_suffix(PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted save
        partial.mkdir(parents=True)
    except OSError as error:
        raise SaveFailed(f"cannot write {partial}: {error}") from error
    return partial


def commit(partial: Path, state: Mapping[str, Any], *, ranks: Mapping[str, int]) -> Path:
    """Check that every role has each element of each tensor exactly once, then publish the checkpoint with the driver's
    `state` (plain data).

    `ranks` is the number of ranks per role. All other files in the directory, such as the driver's own, belong to the
    checkpoint. Replaces a complete checkpoint of the same step. Raises SaveFailed without publishing anything.
    """
    target, replaced = partial.with_suffix(""), partial.with_suffix(REPLACED)
    try:
        for role, count in ranks.items():
            _check_role(partial / role, role, count)
        files: dict[str, dict[str, int]] = {}
        for path in sorted(partial.rglob("[!.]*")):
            if path.is_file() and path != partial / DRIVER_FILE:  # left by an earlier attempt, and rewritten below
                sync(path)  # for the driver's own files; the ranks' are synced already
                about = {"bytes": path.stat().st_size, "crc32": _checksum_of_file(path)}
                files[str(path.relative_to(partial))] = about
        content = json.loads(json.dumps({"format": FORMAT, "state": dict(state), "files": files}))
        write_json(partial / DRIVER_FILE, {**content, "crc32": checksum_of_json(content)})
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(target, replaced)
        publish(partial, target)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, TypeError, CheckpointError) as error:  # TypeError: a state that JSON cannot hold
        raise SaveFailed(f"cannot complete {partial}: {error}; complete checkpoints are untouched") from error
    return target


def read_state(path: str | Path) -> dict[str, Any]:
    """Read the driver's state. Raises CheckpointError if the checkpoint is missing, partial, damaged or
    incompatible. Of the ranks' tensors only the files' sizes are compared: whoever reads a tensor verifies it."""
    directory = Path(path)
    content = _described(directory)
    for name, about in content["files"].items():
        file = directory / name
        try:
            changed = _checksum_of_file(file) != about["crc32"]
        except OSError as error:
            text = f"{file} cannot be read ({error.strerror}); resume from another checkpoint"
            raise unusable(directory, text) from error
        if changed:
            raise unusable(
                directory, f"{file} is not what was saved (its checksum differs); resume from another checkpoint"
            )
    state: dict[str, Any] = content["state"]
    return state


def _described(directory: Path) -> dict[str, Any]:
    """The content of a checkpoint's own file, whose files are all there, with their sizes. Raises CheckpointError."""
    if directory.name.endswith(PARTIAL):
        raise CheckpointError(
            f"{directory} was never completed; resume from a checkpoint whose name does not end in {PARTIAL!r}"
        )
    require_directory(directory)
    if not (directory / DRIVER_FILE).exists() and (other := _instead(directory)):
        raise CheckpointError(other)
    where = directory / DRIVER_FILE
    content = read_json(where, checkpoint=directory)
    if checksum_of_json(content) != content.get("crc32"):
        raise CheckpointDamaged(f"{where} is not what was saved (its checksum differs); resume from another checkpoint")
    for name, about in content["files"].items():
        file, size = directory / name, about["bytes"]
        found: int | None = None
        with contextlib.suppress(OSError, ValueError):  # no path can have a NUL
            found = file.stat().st_size
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise unusable(directory, f"{file} {what}; the checkpoint is damaged, so resume from another one")
    return content


def require_directory(directory: Path) -> None:
    """Raise CheckpointError, with what may be meant, if a checkpoint's directory is not there."""
    if not os.path.isdir(directory):
        others = _committed(directory.parent) if NAME.fullmatch(directory.name) else []
        if others:
            raise CheckpointError(
                f"no checkpoint at {directory}: {KEPT}; use one that still exists, such as {others[0]}"
            )
        fault = "is no directory" if os.path.exists(directory) else "does not exist"
        hint = did_you_mean_path(directory) or f"; use a directory such as {ONE}"
        raise CheckpointError(f"no checkpoint at {directory}, which {fault}{hint}")


def _checksum_of_file(path: Path) -> int:
    """The CRC-32 of a file's bytes; of a file of tensors, which have their own, only of its header."""
    with path.open("rb") as file:
        if path.suffix == TENSORS:
            length = file.read(8)
            return zlib.crc32(length + file.read(min(int.from_bytes(length, "little"), LONGEST_HEADER)))
        found = 0
        while block := file.read(2**20):
            found = zlib.crc32(block, found)
        return found


def newest_intact(run_dir: str | Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint that can be resumed, as far as can be known without reading its tensors; and those newer
    than it, newest first, each with its fault. Partial checkpoints are skipped."""
    faults: dict[Path, str] = {}
    for path in _committed(checkpoints_dir(run_dir)):
        fault = _fault(path)
        if fault is None:
            return path, faults
        faults[path] = fault
    return None, faults


def latest(run_dir: str | Path) -> Path | None:
    """The checkpoint of `newest_intact`."""
    return newest_intact(run_dir)[0]


def retain(run_dir: str | Path, keep: int, *, committed: Path) -> list[str]:
    """Remove all but the newest `keep` complete checkpoints (0 keeps all), and partial ones no newer than `committed`,
    which no save can still be writing. The just `committed` one is the newest: the run has gone back before those of
    later steps, which would be resumed in its place. Returns a line for each of these that was removed, for each that
    could not be, or why none was.
    """
    if fault := _fault(committed, checksums=False):
        return [f"no old checkpoint was removed, because {committed.name} cannot be resumed: {fault}"]
    kept, surplus = {committed.name}, []
    for path in _committed(checkpoints_dir(run_dir)):
        if path.name == committed.name or _fault(path, checksums=False) is not None:
            continue
        replaced = path.suffix == REPLACED and path.stem in kept  # left by an interrupted commit
        if replaced or (keep and (len(kept) >= keep or _step(path) > _step(committed))):
            surplus.append(path)
        else:
            kept.add(path.name)
    left: list[str] = []
    hidden: set[Path] = set()
    for path in surplus:
        if _step(path) > _step(committed):
            left.append(f"{path.name} is removed: the run has gone back before it, and now has {committed.name}")
        # Rename first: an interrupted removal must not leave what looks like a damaged checkpoint.
        aside = path.with_suffix(PARTIAL)
        with _reporting(path, left):
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)
            hidden.add(aside)
    stale = {path for path in checkpoints_dir(run_dir).glob(f"step-*{PARTIAL}") if _step(path) <= _step(committed)}
    for path in sorted(hidden | stale):
        with _reporting(path, left):
            shutil.rmtree(path)
    return left


@contextlib.contextmanager
def _reporting(path: Path, left: list[str]) -> Iterator[None]:
    """Run a block that removes `path`; an OSError becomes a line in `left`."""
    try:
        yield
    except OSError as error:
        left.append(f"{path} could not be removed: {error.strerror}")


def _check_role(directory: Path, role: str, ranks: int) -> None:
    """Raise SaveFailed unless all files are there, and the ranks' boxes of each key cover every tensor exactly once."""
    shapes: dict[str, tuple[int, ...]] = {}
    boxes: dict[str, list[tuple[str, Box]]] = {}  # by key
    buffers: set[str] = set()  # they have no moments
    for rank in range(ranks):
        for name in (tensor_file(rank), index_file(rank)):
            if not (directory / name).exists():
                raise SaveFailed(
                    f"{directory / name} is missing, although rank {rank} wrote it; run.dir must be a directory that "
                    "all nodes share"
                )
        for saved in read_index(directory, rank).boxes:
            known = shapes.setdefault(saved.name, saved.shape)
            if known != saved.shape:
                raise SaveFailed(
                    f"{role}: rank {rank} saved {saved.name!r} as part of {list(saved.shape)}, another rank as part of "
                    f"{list(known)}; correct the backend's chunks"
                )
            boxes.setdefault(saved.key, []).append((saved.name, saved.box))
            if saved.key == BUFFER:
                buffers.add(saved.name)
    if not boxes:
        raise SaveFailed(f"{role}: no rank saved any tensor")
    for key, found in boxes.items():
        # Against the names of all keys: a moment that no rank saved must not be taken for one that is not needed.
        names = buffers if key == BUFFER else shapes.keys() - buffers
        for name, missing in holes({name: shapes[name] for name in sorted(names)}, found).items():
            fault = "are missing" if missing > 0 else "are duplicated or out of place"
            raise SaveFailed(
                f"{role}: {abs(missing)} elements of {key!r} of {name!r}, {list(shapes[name])}, {fault}; "
                "correct the backend's chunks"
            )


def _instead(directory: Path) -> str:
    """Say what a directory is instead of a checkpoint, and what to give; "" for a checkpoint that lacks a file."""
    if NAME.fullmatch(directory.name) or any(directory.glob(f"*/{index_file(0)}")):
        return ""
    if _committed(checkpoints_dir(directory)):
        return f"{directory} is a run directory, not a checkpoint; use one of those in {checkpoints_dir(directory)}"
    if (directory / "config.json").is_file() and any(directory.glob("*.safetensors")):
        return (
            f"{directory} is a model, not a checkpoint; to train or evaluate it, set model.path to it in a config file"
        )
    return f"{directory} is not a checkpoint; use a directory such as {ONE}"


def _committed(directory: Path) -> list[Path]:
    """Committed directories, newest first; one that was being replaced when the driver died comes after its
    successor."""
    found = [
        path
        for path in (directory.iterdir() if os.path.isdir(directory) else ())
        if (match := NAME.fullmatch(path.name)) and match[2] != PARTIAL
    ]
    return sorted(found, key=lambda path: (_step(path), path.suffix != REPLACED), reverse=True)


def _step(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _fault(path: Path, *, checksums: bool = True) -> str | None:
    """Why a committed checkpoint cannot be resumed; None if it can. Without `checksums`, all that is read is its own
    file."""
    try:
        read_state(path) if checksums else _described(path)
    except CheckpointError as error:
        return error.message
    return None
