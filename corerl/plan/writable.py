"""Whether a run's directory can be written to. Imports next to nothing: so does a scaler, beside which a user may have
rewards, whose processes import both."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from corerl.errors import ConfigError


def require_writable(run_dir: Path) -> None:
    """Raise ConfigError if the directory, or what there is of its path, cannot be written to; makes nothing."""
    there = next(each for each in (run_dir, *run_dir.parents) if os.path.lexists(each))
    number = errno.ENOTDIR if not there.is_dir() else errno.EACCES if not os.access(there, os.W_OK | os.X_OK) else 0
    if number:
        raise unwritable(run_dir, OSError(number, f"{there}: {os.strerror(number)}"))


def unwritable(run_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(f"run.dir: cannot write to {run_dir} ({error.strerror}); set another directory")
