"""Write tensors to a safetensors file that others may read as they may read any other file of this process."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

FULL = (errno.ENOSPC, errno.EDQUOT)
GIB = 2**30


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, *, metadata: dict[str, str] | None = None) -> None:
    """Write the file with the mode that the umask gives: safetensors lets nobody but its owner read it. Raises OSError,
    or what safetensors raises."""
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
