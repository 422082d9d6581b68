"""The driver's side: an invisible directory, one rename once all roles are complete; which is newest, which may go."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corerl.checkpoint.format import (
    DRIVER_FILE,
    FORMAT,
    PARTIAL,
    REPLACED,
    checkpoints_dir,
    index_file,
    publish,
    read_index,
    read_json,
    step_dir,
    tensor_file,
    write_json,
)
from corerl.checkpoint.reader import written_ranks
from corerl.errors import CheckpointError, SaveFailed
from corerl.weights.chunks import Box, holes

NAME = re.compile(rf"step-(\d+)({re.escape(PARTIAL)}|{re.escape(REPLACED)})?")


def begin(run_dir: str | Path, step: int) -> Path:
    """An empty directory for the checkpoint of `step`, invisible to `latest`. Each rank writes to its role's
    subdirectory. Raises SaveFailed."""
    partial = step_dir(run_dir, step).with_suffix(PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a save that was interrupted
        partial.mkdir(parents=True)
    except OSError as error:
        raise SaveFailed(f"cannot write {partial}: {error}") from error
    return partial


def commit(partial: Path, state: Mapping[str, Any], *, ranks: Mapping[str, int] | None = None) -> Path:
    """Check that every role is complete, each element of each tensor there once, then make it visible with the driver's
    `state` (plain data).

    `ranks` says how many ranks each role has. Without it, a missing rank is noticed where it held a part that no other
    rank wrote. A complete checkpoint of the same step is replaced. Raises SaveFailed, and nothing becomes visible.
    """
    target, replaced = partial.with_suffix(""), partial.with_suffix(REPLACED)
    try:
        roles = dict(ranks) if ranks is not None else _roles_found(partial)
        if not roles:
            raise SaveFailed(f"cannot complete {partial}: no role has written to it")
        files = {}
        for role, count in roles.items():
            _check_role(partial / role, role, count)
            for rank in range(count):
                for name in (tensor_file(rank), index_file(rank)):
                    files[f"{role}/{name}"] = (partial / role / name).stat().st_size
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
    """The driver's state of a complete checkpoint. Raises CheckpointError where it is missing, half-written, damaged
    or of another format."""
    directory = Path(path)
    if directory.name.endswith(PARTIAL):
        raise CheckpointError(f"{directory} was never completed: resume from one whose name has no {PARTIAL!r}")
    if not os.path.isdir(directory):
        raise CheckpointError(f"no checkpoint at {directory}: give the directory of one, .../checkpoints/step-00000050")
    if not (directory / DRIVER_FILE).exists() and (newest := latest(directory)):
        raise CheckpointError(f"{directory} is the directory of a run: give its newest checkpoint, {newest}")
    content = read_json(directory / DRIVER_FILE)
    for name, size in content["files"].items():
        file = directory / name
        found = file.stat().st_size if file.exists() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise CheckpointError(f"{file} {what}: the checkpoint is damaged, resume from another one")
    state: dict[str, Any] = content["state"]
    return state


def latest(run_dir: str | Path) -> Path | None:
    """The newest checkpoint that can be resumed; half-written and damaged ones are passed over."""
    return next((path for path in _committed(run_dir) if _is_complete(path)), None)


def retain(run_dir: str | Path, keep: int) -> list[Path]:
    """Remove complete checkpoints but the newest `keep` (0 keeps all), and partial ones no newer than the newest
    complete one, which no save can still be writing. Returns what was removed. Called after a commit."""
    complete = [path for path in _committed(run_dir) if _is_complete(path)]
    removed = complete[keep:] if keep else []
    if complete:
        partials = sorted(checkpoints_dir(run_dir).glob(f"step-*{PARTIAL}"))
        removed += [path for path in partials if _step(path) <= _step(complete[0])]
    for path in removed:
        # Out of sight first: a removal that is interrupted must not leave what looks like a damaged checkpoint.
        hidden = path.with_suffix(PARTIAL)
        if hidden != path:
            shutil.rmtree(hidden, ignore_errors=True)
            os.replace(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return removed


def _roles_found(partial: Path) -> dict[str, int]:
    return {path.name: written_ranks(path) for path in sorted(partial.iterdir()) if path.is_dir()}


def _check_role(directory: Path, role: str, ranks: int) -> None:
    """Raises SaveFailed where the ranks' boxes of any key do not cover every tensor exactly once."""
    shapes: dict[str, tuple[int, ...]] = {}
    boxes: dict[str, list[tuple[str, Box]]] = {}  # by key
    for rank in range(ranks):
        for saved in read_index(directory, rank).boxes:
            known = shapes.setdefault(saved.name, saved.shape)
            if known != saved.shape:
                raise SaveFailed(
                    f"{role}: rank {rank} saved {saved.name!r} as part of {list(saved.shape)}, another rank as part of "
                    f"{list(known)}: its chunks are wrong"
                )
            boxes.setdefault(saved.key, []).append((saved.name, saved.box))
    if not boxes:
        raise SaveFailed(f"{role}: no rank has saved any tensor")
    for key, found in boxes.items():
        # Over the names of all keys: a moment that no rank has saved must not pass for one that is not needed.
        for name, missing in holes(shapes, found).items():
            fault = "are missing" if missing > 0 else "are there twice or astray"
            raise SaveFailed(
                f"{role}: {abs(missing)} elements {fault} in {key!r} of {name!r}, {list(shapes[name])}: "
                "its chunks are wrong"
            )


def _committed(run_dir: str | Path) -> list[Path]:
    """Directories that were committed, newest first. One that was being replaced when the driver died counts as well,
    after its successor."""
    directory = checkpoints_dir(run_dir)
    found = [
        path
        for path in (directory.iterdir() if os.path.isdir(directory) else ())
        if (match := NAME.fullmatch(path.name)) and match[2] != PARTIAL
    ]
    return sorted(found, key=lambda path: (_step(path), path.suffix != REPLACED), reverse=True)


def _step(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _is_complete(path: Path) -> bool:
    try:
        read_state(path)
    except CheckpointError:
        return False
    return True
