"""The driver's side of checkpoints: begin and commit them atomically, find the newest, remove old ones."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from corerl.checkpoint.format import (
    DRIVER_FILE,
    FORMAT,
    KEPT,
    PARTIAL,
    REPLACED,
    checkpoints_dir,
    index_file,
    publish,
    read_index,
    read_json,
    require_fields,
    step_dir,
    sync,
    tensor_file,
    unusable,
    write_json,
)
from corerl.checkpoint.reader import damage, written_ranks
from corerl.errors import CheckpointError, SaveFailed
from corerl.weights.chunks import Box, holes

READERS = min(8, os.cpu_count() or 1)  # threads that read a checkpoint; checksums leave the interpreter lock
_damages: dict[tuple[object, ...], str | None] = {}
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


def commit(partial: Path, state: Mapping[str, Any], *, ranks: Mapping[str, int] | None = None) -> Path:
    """Check that every role has each element of each tensor exactly once, then publish the checkpoint with the driver's
    `state` (plain data).

    `ranks` is the number of ranks per role. Without it, a missing rank is only noticed if it held a part that no other
    rank wrote. All other files in the directory, such as the driver's own, belong to the checkpoint. Replaces a
    complete checkpoint of the same step. Raises SaveFailed without publishing anything.
    """
    target, replaced = partial.with_suffix(""), partial.with_suffix(REPLACED)
    try:
        roles = dict(ranks) if ranks is not None else _roles_found(partial)
        if not roles:
            raise SaveFailed(f"cannot complete {partial}: no role wrote to it")
        for role, count in roles.items():
            _require_written(partial / role, count)
            _check_role(partial / role, role, count)
        files = {}
        for path in sorted(partial.rglob("[!.]*")):
            if path.is_file() and path != partial / DRIVER_FILE:  # left by an earlier attempt, and rewritten below
                sync(path)  # for the driver's own files; the ranks' are synced already
                files[str(path.relative_to(partial))] = path.stat().st_size
        write_json(partial / DRIVER_FILE, {"format": FORMAT, "state": dict(state), "roles": roles, "files": files})
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(target, replaced)
        publish(partial, target)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, TypeError, CheckpointError) as error:  # TypeError: a state that JSON cannot hold
        raise SaveFailed(f"cannot complete {partial}: {error}; earlier checkpoints are untouched") from error
    return target


def read_state(path: str | Path) -> dict[str, Any]:
    """Read the driver's state. Raises CheckpointError if the checkpoint is missing, partial, damaged or
    incompatible."""
    directory = Path(path)
    if directory.name.endswith(PARTIAL):
        raise CheckpointError(
            f"{directory} was never completed; resume from a checkpoint whose name does not end in {PARTIAL!r}"
        )
    if not os.path.isdir(directory):
        others = _committed_in(directory.parent) if NAME.fullmatch(directory.name) else []
        advice = (
            f"{KEPT}; use one that still exists, such as {others[0]}" if others else f"use a directory such as {ONE}"
        )
        raise CheckpointError(f"no checkpoint at {directory}: {advice}")
    if not (directory / DRIVER_FILE).exists() and (other := _instead(directory)):
        raise CheckpointError(other)
    content = read_json(directory / DRIVER_FILE, checkpoint=directory)
    file = directory / DRIVER_FILE
    require_fields(content, {"files": dict, "state": dict, "roles": dict}, where=str(file))
    require_fields(content["files"], dict.fromkeys(content["files"], int), where=f"{file}: files")
    require_fields(content["roles"], dict.fromkeys(content["roles"], int), where=f"{file}: roles")
    for name, size in content["files"].items():
        file = directory / name
        found: int | None = None
        with contextlib.suppress(OSError, ValueError):  # no path can have a NUL
            found = file.stat().st_size
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise unusable(directory, f"{file} {what}; the checkpoint is damaged, so resume from another one")
    state: dict[str, Any] = content["state"]
    return state


def latest(run_dir: str | Path, *, read: bool = False) -> Path | None:
    """The newest checkpoint that can be resumed; partial and damaged ones are skipped.

    Unless all is `read`, which takes a core about a second for 2 GB, only missing files and other sizes are noticed."""
    return next((path for path in _committed(run_dir) if _fault(path, read=read) is None), None)


def passed_over(run_dir: str | Path, *, read: bool = False) -> dict[Path, str]:
    """Checkpoints newer than `latest` that can no longer be resumed, newest first, each with what is wrong."""
    found: dict[Path, str] = {}
    for path in _committed(run_dir):
        fault = _fault(path, read=read)
        if fault is None:
            break
        found[path] = fault
    return found


def require_whole(checkpoint: Path) -> None:
    """Read all of a checkpoint. Raises CheckpointError if it is damaged."""
    if fault := _fault(checkpoint, read=True):
        raise CheckpointError(fault)


def retain(run_dir: str | Path, keep: int, *, committed: Path) -> list[str]:
    """Remove all but the newest `keep` complete checkpoints (0 keeps all), and partial ones no newer than `committed`,
    which no save can still be writing. The just `committed` one stays and counts as the newest: later steps belong to
    a run that could not be resumed. Returns a line for each that could not be removed, or why none was.
    """
    if fault := _fault(committed):
        return [f"no old checkpoint was removed, because {committed.name} cannot be resumed: {fault}"]
    kept, surplus = {committed.name}, []
    for path in _committed(run_dir):
        if path.name == committed.name or _fault(path) is not None:
            continue
        replaced = path.suffix == REPLACED and path.stem in kept  # left by an interrupted commit
        if replaced or (keep and len(kept) >= keep):
            surplus.append(path)
        else:
            kept.add(path.name)
    left: list[str] = []
    hidden: set[Path] = set()
    for path in surplus:
        # Rename first: an interrupted removal must not leave what looks like a damaged checkpoint.
        aside = path.with_suffix(PARTIAL)
        with _telling(path, left):
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)
            hidden.add(aside)
    stale = {path for path in checkpoints_dir(run_dir).glob(f"step-*{PARTIAL}") if _step(path) <= _step(committed)}
    for path in sorted(hidden | stale):
        with _telling(path, left):
            shutil.rmtree(path)
    return left


@contextlib.contextmanager
def _telling(path: Path, left: list[str]) -> Iterator[None]:
    """Run a block that removes `path`; an OSError becomes a line in `left`."""
    try:
        yield
    except OSError as error:
        left.append(f"{path} could not be removed: {error.strerror}")


def _roles_found(partial: Path) -> dict[str, int]:
    return {path.name: written_ranks(path) for path in sorted(partial.iterdir()) if path.is_dir()}


def _require_written(directory: Path, ranks: int) -> None:
    for rank in range(ranks):
        for name in (tensor_file(rank), index_file(rank)):
            if not (directory / name).exists():
                raise SaveFailed(
                    f"{directory / name} is missing, although rank {rank} wrote it; run.dir must be a directory that "
                    "all nodes share"
                )


def _check_role(directory: Path, role: str, ranks: int) -> None:
    """Raise SaveFailed unless the ranks' boxes of every key cover every tensor exactly once."""
    shapes: dict[str, tuple[int, ...]] = {}
    boxes: dict[str, list[tuple[str, Box]]] = {}  # by key
    for rank in range(ranks):
        for saved in read_index(directory, rank).boxes:
            known = shapes.setdefault(saved.name, saved.shape)
            if known != saved.shape:
                raise SaveFailed(
                    f"{role}: rank {rank} saved {saved.name!r} as part of {list(saved.shape)}, another rank as part of "
                    f"{list(known)}; correct the backend's chunks"
                )
            boxes.setdefault(saved.key, []).append((saved.name, saved.box))
    if not boxes:
        raise SaveFailed(f"{role}: no rank saved any tensor")
    for key, found in boxes.items():
        # Against the names of all keys: a moment that no rank saved must not be taken for one that is not needed.
        for name, missing in holes(shapes, found).items():
            fault = "are missing" if missing > 0 else "are duplicated or out of place"
            raise SaveFailed(
                f"{role}: {abs(missing)} elements of {key!r} of {name!r}, {list(shapes[name])}, {fault}; "
                "correct the backend's chunks"
            )


def _instead(directory: Path) -> str:
    """Say what a directory is instead of a checkpoint, and what to give; "" for a checkpoint that lacks a file."""
    if NAME.fullmatch(directory.name) or any(directory.glob(f"*/{index_file(0)}")):
        return ""
    if newest := latest(directory):
        return f"{directory} is a run directory, not a checkpoint; use its newest checkpoint, {newest}"
    for fault in passed_over(directory).values():
        return f"{directory} is a run directory without an intact checkpoint: {fault}"
    if os.path.isdir(checkpoints_dir(directory)):
        return f"{directory} is a run directory without a complete checkpoint yet; use a checkpoint of another run"
    if held := _committed_in(directory):
        newest = next((path for path in held if _fault(path) is None), held[0])
        return f"{directory} contains checkpoints but is not one itself; use one of them, such as {newest}"
    if runs := sorted(path.parent for path in directory.glob(f"*/{checkpoints_dir('').name}")):
        return f"{directory} contains runs but is not a checkpoint; use one of the runs, such as {runs[0]}"
    if (directory / "config.json").is_file() and any(directory.glob("*.safetensors")):
        return (
            f"{directory} is a model, not a checkpoint; to train or evaluate it, set model.path to it in a config file"
        )
    return f"{directory} is not a checkpoint; use a directory such as {ONE}"


def _committed(run_dir: str | Path) -> list[Path]:
    return _committed_in(checkpoints_dir(run_dir))


def _committed_in(directory: Path) -> list[Path]:
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


def _fault(path: Path, *, read: bool = False) -> str | None:
    """Why a committed checkpoint cannot be resumed; None if it can."""
    try:
        read_state(path)
        if not read:
            return None
        roles = read_json(path / DRIVER_FILE, checkpoint=path)["roles"]
        for role, ranks in roles.items():
            if (written := written_ranks(path / role)) != ranks:  # before what grows with a number that may be any
                return (
                    f"{path / DRIVER_FILE}: roles: {role!r} is {ranks}, but it has the files of {written} ranks; "
                    "resume from another checkpoint"
                )
    except CheckpointError as error:
        return error.message
    parts = [(path / role, rank) for role, ranks in roles.items() for rank in range(ranks)]
    with ThreadPoolExecutor(READERS) as threads:
        return next((fault for fault in threads.map(lambda part: _damage_once(*part), parts) if fault), None)


def _damage_once(role_dir: Path, rank: int) -> str | None:
    """`damage`, whose answer is kept while the files stay as they are: one start asks several times."""
    try:
        files = [(role_dir / name).stat() for name in (tensor_file(rank), index_file(rank))]
    except OSError:
        return damage(role_dir, rank)
    key = (role_dir, rank, *((file.st_ino, file.st_size, file.st_mtime_ns) for file in files))
    if key not in _damages:
        _damages[key] = damage(role_dir, rank)
    return _damages[key]
