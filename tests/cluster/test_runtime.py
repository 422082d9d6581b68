"""Ray that cannot start, and addresses that are wrong; sessions that start are in test_group.py."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corerl.cluster import runtime
from corerl.cluster.runtime import ray_session
from corerl.errors import ConfigError, CorerlError
from tests.cluster.nodes import session
from tests.machine import paced

pytestmark = pytest.mark.processes


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


SESSION = """
import contextlib, os, sys
from pathlib import Path
from corerl.cluster import runtime
if sys.argv[1] == "as Ray has it":
    runtime._group_of_its_own = contextlib.nullcontext
    runtime._keep_token_private = lambda: None
    runtime._job = lambda: None
os.umask(0o022)
with runtime.ray_session(address="", cpus=1):
    stats = [(each / "stat").read_text().rpartition(")") for each in Path("/proc").glob("[0-9]*")]
    children = [(name.partition("(")[2], rest.split()) for name, _, rest in stats]
    print(sorted({name for name, (_, parent, group, *_) in children
                  if int(parent) == os.getpid() and int(group) == os.getpgrp()}))
    print(*(oct((Path.home() / each).stat().st_mode)[-3:] for each in (".ray", ".ray/auth_token")))
    paths = runtime.ray._private.worker.global_worker.core_worker.get_job_config().py_driver_sys_path
    print(os.getcwd() in paths)
    print(os.environ["RAY_AUTH_MODE"])  # which Ray's processes, those of the run among them, have inherited
"""


@pytest.mark.parametrize(("whose", "there"), [("as Ray has it", True), ("ours", False)])
def test_rays_processes_have_a_process_group_and_its_token_a_directory_that_are_the_drivers_own(
    tmp_path: Path, whose: str, there: bool
) -> None:
    """Where the first case fails Ray keeps SIGTERM to the group from its processes, others from its token, or the
    working directory from the first place where workers look for modules, by itself, and `_group_of_its_own`,
    `_keep_token_private` or `_job` can go."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    found = subprocess.run(
        [sys.executable, "-c", SESSION, whose],
        capture_output=True,
        text=True,
        timeout=paced(120),
        env={**environment, "HOME": str(tmp_path)},
    )
    assert found.returncode == 0, found.stderr
    group, modes, first, demanded = found.stdout.splitlines()
    assert ("gcs_server" in group and "raylet" in group) == there, group
    assert there or group == "[]"
    assert (modes, demanded) == ("755 644" if there else "700 644", "token")
    assert first == str(there)


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_where_nobody_listens_is_refused_before_ray_begins_to_wait(prefix: str) -> None:
    address = f"{prefix}127.0.0.1:{closed_port()}"
    with pytest.raises(ConfigError) as caught:
        with ray_session(address=address, cpus=1):
            pass
    assert caught.value.message == (
        f"cluster.address: no Ray cluster at '{address}' ([Errno 111] Connection refused); set it to the host:port "
        "printed by `ray start --head`, or leave it empty to start Ray on this machine"
    )


@pytest.mark.parametrize("port", ["6379x", "70000"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match=rf"^cluster.address: no Ray cluster at '127.0.0.1:{port}' "):
        with ray_session(address=f"127.0.0.1:{port}", cpus=1):
            pass


def test_an_address_where_something_else_listens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "ANSWER_SECONDS", 3.0)
    with socket.socket() as silent:
        silent.bind(("", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError) as caught:
            with ray_session(address=address, cpus=1):
                pass
    assert caught.value.message.startswith(f"cluster.address: no Ray cluster at '{address}' (no answer within 3 s); ")


def test_a_directory_that_ray_cannot_write_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)]
    with pytest.raises(CorerlError) as caught:
        with ray_session(address="", cpus=1):
            pass
    assert re.fullmatch(
        rf"cannot start Ray on this machine: \[Errno 20\] Not a directory: '{tmp_path}/file/ray'; Ray writes to "
        rf"{tmp_path}/file \(.* GiB free; set RAY_TMPDIR to change it\) and logs to ray/session_latest/logs in it",
        caught.value.message,
    )
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)] == handlers


HANGS = """
import os, signal, sys, threading
from ray._private import services
from corerl.cluster import runtime

services.GCS_SERVER_EXECUTABLE = sys.argv[1]
runtime.START_SECONDS = 3.0
signal.signal(signal.SIGTERM, lambda *_: print("heard"))
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
try:
    with runtime.ray_session(address="", cpus=1):
        pass
except runtime.CorerlError as error:
    print(error)
"""


@pytest.mark.nightly
def test_a_ray_that_hangs_at_its_start_is_given_up_and_leaves_no_process(tmp_path: Path) -> None:
    server = tmp_path / "server"
    server.write_text("#!/bin/sh\nexec sleep 600\n")
    server.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-c", HANGS, str(server)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Ray sees no signal while it waits in native code, here for its server: for 30 s at a time by itself.
        env={**os.environ, "RAY_gcs_server_port_wait_time_s": "4"},
    ) as driver:
        out, _ = driver.communicate(timeout=paced(60.0))
        deadline = time.monotonic() + paced(60.0)
        while left := session(driver.pid):
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.05)
    heard, line = out.splitlines()
    assert heard == "heard"  # by the run's own handler, though Ray has one
    assert line.startswith(
        "cannot start Ray on this machine: no answer within 3 s; it was tried twice, with a load of "
    )
    assert "; Ray writes to " in line


@pytest.mark.parametrize(
    ("errors", "starts", "said"),
    [
        (["The current node timed out during startup."], 2, ""),
        (
            ["The current node timed out during startup."] * 2,
            2,
            (
                r"The current node timed out during startup.; it was tried twice, with a load of [\d.]+ on \d+ "
                "cores: end other programs and try again, or start Ray beforehand with `ray start --head` and set "
                "cluster.address"
            ),
        ),
        (["Timed out after 30 seconds while waiting for node to startup."], 2, ""),
        (["No space left on device"], 1, "No space left on device"),
    ],
)
def test_a_start_of_ray_that_takes_too_long_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, errors: list[str], starts: int, said: str
) -> None:
    asked: list[dict[str, object]] = []

    def init(**options: object) -> None:
        asked.append({**options, "job_config": type(options["job_config"])})  # one is made for each start
        if len(asked) <= len(errors):
            raise Exception(errors[len(asked) - 1])

    monkeypatch.setattr(runtime.ray, "init", init)
    refused = pytest.raises(CorerlError, match=f"^cannot start Ray on this machine: {said}; Ray writes to ")
    with refused if said else contextlib.nullcontext():
        with ray_session(address="", cpus=1):
            pass
    assert asked == asked[:1] * starts


# ---- a cluster with a token ------------------------------------------------------------------------------------------

# What `ray health-check` of Ray 2.60 says to a process without the token.
UNAUTHENTICATED = (
    "ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: Authentication token is missing or incorrect. "
    "Note: RAY_AUTH_MODE is currently 'disabled' (not 'token'). Ensure that the token for the cluster is available"
)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (None, "demands a token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to what "),
        ("disabled", "demands a token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to what "),
        ("token", "refuses the token of this process; set RAY_AUTH_TOKEN to what "),
    ],
)
def test_a_cluster_that_wants_another_token_is_told_with_the_variables_to_set(
    monkeypatch: pytest.MonkeyPatch, mode: str | None, said: str
) -> None:
    monkeypatch.setattr(runtime, "_require_listening", lambda address: None)
    answer = subprocess.CompletedProcess([], 1, "", f"Traceback (most recent call last):\n{UNAUTHENTICATED}\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    monkeypatch.setenv("RAY_AUTH_MODE", mode) if mode else monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError) as caught:
        with ray_session(address="10.0.0.1:6379", cpus=1):
            raise AssertionError("there is no session")
    assert caught.value.message.startswith(f"cluster.address: the Ray cluster at '10.0.0.1:6379' {said}")
    assert "get-auth-token" in caught.value.message and "\n" not in caught.value.message


def test_a_cluster_that_refuses_the_token_only_in_the_session_is_told_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError(UNAUTHENTICATED)

    for name, stand_in in (("_require_listening", id), ("_require_answering", id), ("_init", refuse)):
        monkeypatch.setattr(runtime, name, stand_in)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError, match="demands a token; set RAY_AUTH_MODE=token"):
        with ray_session(address="10.0.0.1:6379", cpus=1):
            raise AssertionError("there is no session")
