"""Start Ray on this machine for the duration of a run, or join an existing cluster; put data into its object store."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from corerl.errors import ConfigError, CorerlError
from corerl.messages import first_line

CPUS = 1024  # of a Ray that is started here, which only counts them: a run's groups may grow, and others may follow
ANSWER_SECONDS = 20.0  # for a cluster to answer
GCS_SECONDS = 20  # after which Ray ends a process whose GCS has died, the driver too; 60 by default
DEMANDS_TOKEN = re.compile(r"AuthenticationError|InvalidAuthToken|Unauthenticated|authentication token", re.IGNORECASE)


@contextlib.contextmanager
def ray_session(*, address: str, cpus: float = CPUS) -> Iterator[bool]:
    """Start Ray on this machine with `cpus` logical CPUs and shut it down at the end, or join and leave `address`.
    Where this process has a Ray already, that is used, and left as it is. A start that takes too long is tried
    once more.

    Yields whether Ray ends with the block. If one of Ray's own processes dies meanwhile, Ray ends this process, or
    calls of its processes raise.

    Raises CorerlError, in one line, if Ray cannot start or the cluster does not answer.
    """
    if ray.is_initialized():
        yield False
        return
    if address:
        _require_answering(address)
    # Without this, Ray warns about a changed default that does not concern us.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        try:
            _init(address, cpus)
        except Exception as error:
            # On a busy machine Ray gives up on its own processes after some 30 seconds; the next ones find their files
            # in memory. Ray has no type of its own for that.
            late = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
            if address or ray.is_initialized() or not late:
                raise
            ray.shutdown()
            _init(address, cpus)
    except Exception as error:  # Ray may raise a bare Exception here
        if address and DEMANDS_TOKEN.search(str(error)):
            raise _no_token(address) from error
        what = f"connect to the Ray cluster at {address}" if address else "start Ray on this machine"
        own = not address and not ray.is_initialized()
        raise CorerlError(f"cannot {what}: {first_line(error)}{_disk() if own else ''}") from error
    try:
        yield not address
    finally:
        ray.shutdown()


def _init(address: str, cpus: float) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="corerl")
            return
        _keep_token_private()
        ray.init(
            address="local",  # never a cluster that someone else started here
            num_cpus=max(1, int(-(-cpus // 1))),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="corerl",
            # No workers in advance: ours need environments of their own.
            _system_config={
                "prestart_worker_first_driver": False,
                "gcs_rpc_server_reconnect_timeout_s": GCS_SECONDS,
            },
        )
    finally:  # ray.init sets one that ends the process wherever it is; ours stops the run after its step
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _keep_token_private() -> None:
    """Let nobody else into the directory in which Ray keeps the token that its sockets demand: Ray, up to 2.60, leaves
    both readable for all users."""
    directory = Path.home() / ".ray"
    with contextlib.suppress(OSError, RuntimeError):  # Ray says so if it needs a home directory that does not exist
        directory.mkdir(exist_ok=True)
        directory.chmod(stat.S_IRWXU)


def _disk() -> str:
    """Describe where Ray writes and how much is free there: Ray dies silently if the disk is full."""
    directory = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    try:
        free = f"{shutil.disk_usage(directory).free / 2**30:.1f} GiB free"
    except OSError as error:
        free = str(error.strerror)
    return (
        f"; Ray writes to {directory} ({free}; set RAY_TMPDIR to change it) and logs to ray/session_latest/logs in it; "
        "on a busy machine start Ray beforehand with `ray start --head` and set cluster.address"
    )


def _require_answering(address: str) -> None:
    """Raise ConfigError if no Ray cluster of this version answers at `address`. Ray itself would retry for many
    minutes: a socket tells at once whether somebody listens there, and a subprocess, which can be abandoned, asks."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    try:
        if colon:  # not a name such as "auto", which Ray resolves at once
            socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
        if address.startswith("ray://"):
            return  # a Ray Client server, which has no such health check
        command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        raise _no_cluster(address, f"no answer within {ANSWER_SECONDS:g} s") from None
    except (OSError, ValueError, OverflowError) as error:
        raise _no_cluster(address, error) from error
    if answer.returncode != 0:
        raise _no_cluster(address, (answer.stderr.strip() or "no answer").splitlines()[-1])


def _no_token(address: str) -> ConfigError:
    """The cluster was started with a token, as `ray start` does for a user who has one. Ray's own message is long
    and does not say that it looks for a token only in one of its modes."""
    return ConfigError(
        f"cluster.address: the Ray cluster at {address!r} demands a token that this process does not have; set "
        "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to what `ray get-auth-token` prints on the machine of "
        "`ray start --head` (not needed if this user has it in ~/.ray/auth_token)"
    )


def _no_cluster(address: str, reason: object) -> ConfigError:
    if DEMANDS_TOKEN.search(str(reason)):
        return _no_token(address)
    return ConfigError(
        f"cluster.address: no Ray cluster at {address!r} ({reason}); set it to the host:port printed by "
        "`ray start --head`, or leave it empty to start Ray on this machine"
    )


def put(value: Any) -> Any:
    """Return a reference that process calls accept in place of the value; its arrays are then read without a copy.

    If the store is full, Ray moves older objects to disk; raises CorerlError if the disk is full too.
    """
    try:
        return ray.put(value)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise CorerlError(
            "Ray's object store is full, and so is the disk that it spills to (see df and `ray memory`); free disk "
            "space, use a smaller rollout batch, or start Ray with more --object-store-memory"
        ) from error
