"""Start Ray on this machine for the duration of a run, or join an existing cluster."""

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
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray._private import services as ray_services
from ray._private import utils
from ray.exceptions import RayError
from ray.job_config import JobConfig

from corerl.cluster import services, with_parent
from corerl.errors import ConfigError, CorerlError, WorkerDied
from corerl.messages import first_line
from corerl.spare import cores

CPUS = 1024  # of a Ray that is started here, which only counts them: a run's groups may grow, and others may follow
START_SECONDS = 120.0  # for Ray to start: it takes about five, and usually gives up by itself after thirty
FORWARD_SECONDS = 3.0  # for Ray, which polls ten times a second if nothing else runs, to forward the last output
ANSWER_SECONDS = 20.0  # for a cluster to answer
# Not what is there when a block begins: a start that is given up at the wrong moment does not put it back.
POPEN = ray_services.ConsolePopen
DEMANDS_TOKEN = re.compile(r"AuthenticationError|InvalidAuthToken|Unauthenticated|authentication token", re.IGNORECASE)


@contextlib.contextmanager
def ray_session(*, address: str, cpus: float = CPUS, forward: bool = False) -> Iterator[bool]:
    """Start Ray on this machine with `cpus` logical CPUs and shut it down at the end, or join and leave `address`.
    Where this process has a Ray already, that is used, and left as it is. With `forward`, output of its processes is
    printed here too. A start that takes too long is tried once more.

    Yields whether Ray ends with the block. If one of the processes dies of a Ray that was started here, the main thread
    is interrupted as by Ctrl-C, wherever it is in the block; the block's end raises WorkerDied, which says which one it
    was.

    Raises CorerlError, in one line, if Ray cannot start or the cluster does not answer.
    """
    if ray.is_initialized():
        yield False
        return
    if address:
        _require_listening(address)
        _require_answering(address)
    # Without this, Ray warns about a changed default that does not concern us.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        try:
            _init(address, cpus, forward)
        except Exception as error:
            # On a busy machine Ray gives up on its own processes after some 30 seconds; the next ones find their files
            # in memory.
            if address or ray.is_initialized() or not _timed_out(error):
                raise
            ray.shutdown()
            _init(address, cpus, forward)
    except Exception as error:  # Ray may raise a bare Exception here
        if address and DEMANDS_TOKEN.search(str(error)):
            raise _no_token(address) from error
        where = f"connect to the Ray cluster at {address}" if address else "start Ray on this machine"
        own = not address and not ray.is_initialized()
        hint = (_busy() if _timed_out(error) else "") + _room() if own else ""
        raise CorerlError(f"cannot {where}: {first_line(error)}{hint}") from error
    try:
        with services.watched() as watch:
            try:
                yield not address
            except (CorerlError, RayError, KeyboardInterrupt) as error:
                if died := watch.seen(services.SEEN_SECONDS if isinstance(error, (WorkerDied, RayError)) else 0.0):
                    raise WorkerDied(died.death) from error
                raise
    finally:
        if forward:
            time.sleep(FORWARD_SECONDS)
        # Nobody looks on any more: nothing here is at the object store, for which Ray would end this process, so that
        # it ends well although raylet is killed, before this or in it (tried in Ray 2.60). And as raylet ends here in
        # any case, it would be blamed where this process is killed.
        ray.shutdown()


def _init(address: str, cpus: float, forward: bool) -> None:
    with _uninterrupted(), _within(START_SECONDS), _sigterm_left_alone():
        if address:
            ray.init(
                address=address,
                job_config=_job(),
                log_to_driver=forward,
                logging_level=logging.ERROR,
                namespace="corerl",
            )
            return
        _keep_token_private()
        with _group_of_its_own():
            ray.init(
                address="local",  # never a cluster that someone else started here
                num_cpus=max(1, int(-(-cpus // 1))),
                include_dashboard=False,
                job_config=_job(),
                log_to_driver=forward,
                logging_level=logging.ERROR,
                namespace="corerl",
                # No workers in advance: ours need environments of their own.
                _system_config={"prestart_worker_first_driver": False},
            )


class _NoPaths(list[str]):
    """Stays empty, whatever is added by `extend`."""

    def extend(self, _: Iterable[str]) -> None:
        pass


def _job() -> JobConfig:
    """A job whose workers look for modules where they would by themselves: Ray puts the directories of the driver and
    of its script first on their `sys.path`, before installed packages. Read in Ray 2.59 and 2.60."""
    job = JobConfig()
    job._py_driver_sys_path = _NoPaths()
    return job


def _keep_token_private() -> None:
    """Let nobody else into the directory in which Ray keeps the token that its sockets demand: Ray, up to 2.60, leaves
    both readable for all users."""
    directory = Path.home() / ".ray"
    with contextlib.suppress(OSError, RuntimeError):  # Ray says so if it needs a home to write to and there is none
        directory.mkdir(exist_ok=True)
        directory.chmod(stat.S_IRWXU)


def _timed_out(error: Exception) -> bool:
    """Whether Ray did not start in time, for which it has no type of its own."""
    return isinstance(error, TimeoutError) or "timed out" in str(error).lower()


@contextlib.contextmanager
def _group_of_its_own() -> Iterator[None]:
    """Start Ray's processes outside this process's group inside the block, as Ray does on Windows.

    `timeout` and job schedulers send SIGTERM to the whole group. Ray shields its processes from SIGINT only, and if
    they die first, a run cannot end properly. They still end with this process, however it ends: the kernel sees to
    that. Where it cannot, Ray's reaper looks for them in this group, so they stay in it.
    Read in Ray 2.59 and 2.60; requested in https://github.com/ray-project/ray/issues/2830.
    """
    if not utils.detect_fate_sharing_support():
        yield
        return

    def start(command: Sequence[str], **options: Any) -> Any:
        return POPEN([_with_raylet(word) for word in command], process_group=0, **options)

    ray_services.ConsolePopen = start  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        ray_services.ConsolePopen = POPEN  # type: ignore[misc]


def _with_raylet(word: str) -> str:
    """An argument of raylet's; an agent's command is run by `with_parent`."""
    option, equals, command = word.partition("=")
    if option not in ("--dashboard_agent_command", "--runtime_env_agent_command"):
        return word
    return f"{option}{equals}{subprocess.list2cmdline([sys.executable, '-IS', with_parent.__file__])} {command}"


@contextlib.contextmanager
def _sigterm_left_alone() -> Iterator[None]:
    """Keep this process's handler of SIGTERM inside the block and behind it: ray.init sets one that ends the process by
    SystemExit, wherever it is, and later, in native code, one that prints a stack before it calls the handler that was
    there. Read in Ray 2.59 and 2.60."""
    set_handler, handler = utils.set_sigterm_handler, signal.getsignal(signal.SIGTERM)
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Run the handlers of SIGINT and SIGTERM inside the block as ever, but raise KeyboardInterrupt of theirs behind it:
    a Ray that has started by half can only be ended by a crash."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    late: list[KeyboardInterrupt] = []

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            handler = before[signal.Signals(number)]
            assert callable(handler)
            handler(number, frame)
        except KeyboardInterrupt as error:
            late.append(error)

    ours = [number for number, handler in before.items() if callable(handler)]
    for number in ours:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
    if late:
        ray.shutdown()
        raise late[0]


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the block takes longer, once it is back in Python: Ray's native waits end after some 30
    seconds. Without effect outside the main thread, which alone gets signals."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"no answer within {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0)  # the signal may still arrive here
        finally:
            signal.signal(signal.SIGALRM, handler)


def _busy() -> str:
    """What to do about a Ray that has not started in time, twice."""
    return (
        f"; it was tried twice, with a load of {os.getloadavg()[0]:.1f} on {cores()} cores: end other programs and "
        "try again, or start Ray beforehand with `ray start --head` and set cluster.address"
    )


def _room() -> str:
    """Describe where Ray writes and how much is free there: Ray dies silently if the disk is full."""
    directory = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    try:
        free = f"{shutil.disk_usage(directory).free / 2**30:.1f} GiB free"
    except OSError as error:
        free = str(error.strerror)
    return (
        f"; Ray writes to {directory} ({free}; set RAY_TMPDIR to change it) and logs to ray/session_latest/logs in it"
    )


def _require_answering(address: str) -> None:
    """Raise ConfigError if the listener at `address` does not answer as a Ray cluster of this version. Ray itself would
    retry for long, so a subprocess asks, which can be abandoned."""
    if address.startswith("ray://"):
        return  # a Ray Client server, which has no such health check
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS)
        if answer.returncode == 0:
            return
        reason = (answer.stderr.strip() or "no answer").splitlines()[-1]
    except subprocess.TimeoutExpired:
        reason = f"no answer within {ANSWER_SECONDS:g} s"
    raise _no_cluster(address, reason)


def _no_token(address: str) -> ConfigError:
    """The cluster was started with a token, as `ray start` does for a user who has one. Ray's own message is long
    and does not say that it looks for a token only in one of its modes."""
    if os.environ.get("RAY_AUTH_MODE") == "token":
        return ConfigError(
            f"cluster.address: the Ray cluster at {address!r} refuses the token of this process; set RAY_AUTH_TOKEN to "
            "what `ray get-auth-token` prints on the machine of `ray start --head`, or RAY_AUTH_TOKEN_PATH to its file"
        )
    return ConfigError(
        f"cluster.address: the Ray cluster at {address!r} demands a token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN "
        "to what `ray get-auth-token` prints on the machine of `ray start --head` (not needed if this user has it in "
        "~/.ray/auth_token)"
    )


def _require_listening(address: str) -> None:
    """Raise ConfigError if nobody listens at `address`: Ray itself would retry for many minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon:
        return  # a name such as "auto", which Ray resolves at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, reason: object) -> ConfigError:
    if DEMANDS_TOKEN.search(str(reason)):
        return _no_token(address)
    return ConfigError(
        f"cluster.address: no Ray cluster at {address!r} ({reason}); set it to the host:port printed by "
        "`ray start --head`, or leave it empty to start Ray on this machine"
    )
