"""Ray for as long as a run lasts: a cluster of this machine's own, or a place in one that is there already."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator

import ray

from corerl.errors import ConfigError, CorerlError


@contextlib.contextmanager
def ray_session(*, address: str, cpus: float) -> Iterator[None]:
    """Start Ray on this machine with `cpus` logical CPUs, and shut it down at the end; or join, and leave, `address`.

    Raises CorerlError in one line where Ray cannot start or the cluster does not answer.
    """
    _require_listening(address)
    # Ray else warns about a change of default that does not concern us.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # no control codes around what Ray itself has to say
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="corerl")
        else:
            ray.init(
                address="local",  # never a cluster that someone else has started here
                num_cpus=max(1, int(-(-cpus // 1))),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace="corerl",
                _node_ip_address="127.0.0.1",
            )
    except (ConnectionError, OSError, RuntimeError, ValueError, TimeoutError) as error:
        where = f"connect to the Ray cluster at {address}" if address else "start Ray on this machine"
        raise CorerlError(f"cannot {where}: {error}") from error
    finally:
        # ray.init puts its own handler in the place of whoever waits for the signal, and that one aborts the process.
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _require_listening(address: str) -> None:
    """Raises ConfigError where nobody listens at `address`: Ray itself asks again and again for many minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon:
        return  # empty, or a name such as "auto", which Ray answers at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"cluster.address: no Ray cluster at {address!r} ({error}); give the host:port that `ray start --head` "
            "printed, or leave it empty to start Ray on this machine"
        ) from error
