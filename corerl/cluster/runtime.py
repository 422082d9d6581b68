"""Ray for as long as a run lasts: a cluster of this machine's own, or a place in one that is there already."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import ray
from ray._private import services
from ray._private.utils import detect_fate_sharing_support

from corerl.errors import ConfigError, CorerlError
from corerl.messages import first_line

START_SECONDS = 120.0  # that Ray has to start: it takes about five, and mostly gives up by itself after thirty
FORWARD_SECONDS = 1.0  # in which Ray, which looks for it ten times a second, forwards what was printed last
ANSWER_SECONDS = 20.0  # that a cluster has to answer


@contextlib.contextmanager
def ray_session(*, address: str, cpus: float, forward: bool = False) -> Iterator[None]:
    """Start Ray on this machine with `cpus` logical CPUs, and shut it down at the end; or join, and leave, `address`.
    With `forward`, what its processes print is printed here too.

    Raises CorerlError in one line where Ray cannot start or the cluster does not answer.
    """
    if address:
        _require_listening(address)
        _require_answering(address)
    # Ray else warns about a change of default that does not concern us.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with _within(START_SECONDS):
            if address:
                ray.init(address=address, log_to_driver=forward, logging_level=logging.ERROR, namespace="corerl")
            else:
                with _group_of_its_own():
                    ray.init(
                        address="local",  # never a cluster that someone else has started here
                        num_cpus=max(1, int(-(-cpus // 1))),
                        include_dashboard=False,
                        log_to_driver=forward,
                        logging_level=logging.ERROR,
                        namespace="corerl",
                        # Workers that it would start before they are asked for, and ours have an environment of their
                        # own.
                        _system_config={"prestart_worker_first_driver": False},
                    )
    except Exception as error:  # a bare Exception is among what Ray raises here
        where = f"connect to the Ray cluster at {address}" if address else "start Ray on this machine"
        room = "" if address or ray.is_initialized() else _room()
        raise CorerlError(f"cannot {where}: {first_line(error)}{room}") from error
    finally:
        # ray.init puts its own handler in the place of whoever waits for the signal, and that one aborts the process.
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        if forward:
            time.sleep(FORWARD_SECONDS)
        ray.shutdown()


@contextlib.contextmanager
def _group_of_its_own() -> Iterator[None]:
    """Ray's processes begin, while the block lasts, outside of this one's process group, as they do on Windows.

    `timeout` and job schedulers send SIGTERM to the whole group. Ray keeps SIGINT alone from its processes; without
    them nothing of a run ends as it should. They still end with this process, whatever ends it: the kernel sees to it,
    and where it cannot, Ray's reaper looks for them in this group, and they stay there.
    Read in Ray 2.40 and 2.60; asked for in https://github.com/ray-project/ray/issues/2830.
    """
    if not detect_fate_sharing_support():
        yield
        return
    popen = services.ConsolePopen
    services.ConsolePopen = functools.partial(popen, process_group=0)  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """A block that raises TimeoutError where it takes longer, as soon as it is in Python again: Ray's native waits end
    after some 30 seconds. Outside the main thread, which alone gets signals, it may take as long as it will."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"it did not answer within {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0)  # the signal may arrive here yet
        finally:
            signal.signal(signal.SIGALRM, handler)


def _room() -> str:
    """Where Ray writes, and what is free there: it dies without a word where that is nothing."""
    directory = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    try:
        free = f"{shutil.disk_usage(directory).free / 2**30:.1f} GiB free"
    except OSError as error:
        free = str(error.strerror)
    return f"; it writes to {directory} ({free}), RAY_TMPDIR names another directory; its logs: ray/session_latest/logs"


def _require_answering(address: str) -> None:
    """Raises ConfigError where whoever listens at `address` does not answer as a Ray cluster of this version. Ray
    itself would ask it again and again; so another process asks, and can be given up."""
    if address.startswith("ray://"):
        return  # a Ray client's server, which this question is not for
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS)
        if answer.returncode == 0:
            return
        reason = (answer.stderr.strip() or "no answer").splitlines()[-1]
    except subprocess.TimeoutExpired:
        reason = f"no answer within {ANSWER_SECONDS:g} s"
    raise _no_cluster(address, reason)


def _require_listening(address: str) -> None:
    """Raises ConfigError where nobody listens at `address`: Ray itself asks again and again for many minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon:
        return  # a name such as "auto", which Ray answers at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, reason: object) -> ConfigError:
    return ConfigError(
        f"cluster.address: no Ray cluster at {address!r} ({reason}); give the host:port that `ray start --head` "
        "printed, or leave it empty to start Ray on this machine"
    )
