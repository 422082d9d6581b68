"""Write to a run's directory, while no other run does."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from corerl.config.load import CONFIG_FILE, dump_toml
from corerl.errors import ConfigError, SaveFailed
from corerl.observability.jsonl import keep
from corerl.plan.resume import unwritable


@contextmanager
def occupied(run_dir: Path, *, make: bool = True) -> Iterator[None]:
    """Lock the directory for this process, and `make` it first if it does not exist. Raises ConfigError if another run
    holds it, or it is not writable."""
    try:
        if make:
            run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    except OSError as error:
        raise unwritable(run_dir, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the system however the process ends
        except BlockingIOError as error:
            raise ConfigError(
                f"run.dir: another run is writing to {run_dir}; set another directory, or wait for it to end"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks
                raise
        yield


def is_occupied(run_dir: Path) -> bool:
    """Whether a run is writing there. Raises ConfigError if there is no such directory."""
    try:
        with occupied(run_dir, make=False):
            return False
    except ConfigError:
        if not run_dir.is_dir():
            raise
        return True


def write_config(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Write config.toml, the run's config as plain data. An existing different one, say from before a resumed run's
    overrides or edited by hand, is kept as config-1.toml, config-2.toml and so on. Raises ConfigError if the file
    cannot be written."""
    path, text = run_dir / CONFIG_FILE, dump_toml(record).encode()
    part = path.with_name(f".{path.name}.part")
    try:
        if path.exists() and path.read_bytes() == text:
            return
        part.write_bytes(text)
        keep(path)
        os.replace(part, path)
    except OSError as error:
        raise unwritable(run_dir, error) from error


def require_there(run_dir: Path) -> None:
    """Raise SaveFailed if someone has removed a running run's directory, or moved it: what writes to open files there
    does not notice, and the next checkpoint would make another one."""
    if not os.path.lexists(run_dir / CONFIG_FILE):
        raise SaveFailed(
            f"run.dir: {run_dir} or its {CONFIG_FILE} has been removed or moved while the run was writing there; start "
            "the run again, and leave its directory alone"
        )
