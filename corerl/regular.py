"""Tell regular files from what a path may lead to as well: reading a pipe or a device may never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def require_regular(path: str | Path) -> None:
    """Raise OSError unless `path` leads to a regular file that may be read, or to a directory, which the system refuses
    to read. Not all libraries tell a file that may not be read from one that is missing."""
    _require_regular(path)
    os.close(os.open(path, os.O_RDONLY))


def require_all_regular(directory: str | Path) -> None:
    """That each entry of a directory is a regular file or a directory, before a library opens them; links that lead
    nowhere are none. It may not need those that may not be read."""
    for entry in sorted(Path(directory).iterdir()):
        if os.path.exists(entry):
            _require_regular(entry)


def _require_regular(path: str | Path) -> None:
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a NUL in it, or what UTF-8 cannot have
        raise OSError(errno.EINVAL, "is no path", str(path)) from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "is a pipe or a device, not a regular file", str(path))
