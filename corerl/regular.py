"""Tell regular files from what a path may lead to as well: reading a pipe or a device may never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def require_regular(path: str | Path) -> None:
    """Raise OSError unless `path` leads to a regular file, or to a directory, which the system refuses to read."""
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a NUL in it, or what UTF-8 cannot have
        raise OSError(errno.EINVAL, "is no path", str(path)) from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "is a pipe or a device, not a regular file", str(path))


def require_all_regular(directory: str | Path) -> None:
    """`require_regular` of each entry of a directory, before a library opens them; links that lead nowhere are none."""
    for entry in sorted(Path(directory).iterdir()):
        if os.path.exists(entry):
            require_regular(entry)
