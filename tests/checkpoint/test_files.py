from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from corerl.checkpoint.format import room_for, write_tensors


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_a_file_of_tensors_has_the_umasks_mode(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_tensors({"a": torch.ones(2)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o666 & ~mask
    assert load_file(tmp_path / "a.safetensors")["a"].tolist() == [1.0, 1.0]


def test_a_full_disk_is_reported_with_needed_and_free_bytes(tmp_path: Path) -> None:
    path = tmp_path / "not/yet/a.safetensors"
    full = "Error while serializing: I/O error: No space left on device (os error 28)"
    for error in (OSError(errno.ENOSPC, "No space left on device"), SafetensorError(full)):
        assert re.fullmatch(
            rf"; 3 GiB are needed and [\d.e+]+ GiB free in {tmp_path}: free disk space, or set another run.dir, "
            "then resume",
            room_for(3 * 2**30, path, error),
        )
    over = "Error while serializing: I/O error: Disk quota exceeded (os error 122)"
    for error in (OSError(errno.EDQUOT, "Disk quota exceeded"), SafetensorError(over)):
        assert room_for(3 * 2**30, path, error) == (
            f"; 3 GiB are needed in {tmp_path}, more than is left of the quota: free disk space, or set another "
            "run.dir, then resume"
        )
    assert room_for(8, path, OSError(errno.EACCES, "Permission denied")) == ""
    assert room_for(8, path, SafetensorError("I/O error: File too large (os error 27)")) == ""
