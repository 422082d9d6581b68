"""Ray that cannot start, and addresses that are wrong; sessions that start are in test_group.py."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from corerl.cluster import runtime
from corerl.cluster.runtime import ray_session
from corerl.errors import ConfigError, CorerlError
from tests.machine import paced

pytestmark = pytest.mark.processes


SESSION = """
import os, signal
from pathlib import Path
from corerl.cluster import runtime
os.umask(0o022)
def handler(*_): ...
signal.signal(signal.SIGTERM, handler)
with runtime.ray_session(address="", cpus=1):
    print(*(oct((Path.home() / each).stat().st_mode)[-3:] for each in (".ray", ".ray/auth_token")))
    print(os.environ["RAY_AUTH_MODE"])  # which Ray's processes, those of the run among them, have inherited
    print(signal.getsignal(signal.SIGTERM) is handler)
"""


def test_a_session_keeps_its_token_private_and_signal_handlers(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    found = subprocess.run(
        [sys.executable, "-c", SESSION],
        capture_output=True,
        text=True,
        timeout=paced(120),
        env={**environment, "HOME": str(tmp_path)},
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["700 644", "token", "True"]


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:{closed}", "[Errno 111] Connection refused"),
        ("ray://127.0.0.1:{closed}", "[Errno 111] Connection refused"),
        ("127.0.0.1:{silent}", "no answer within 1 s"),
        ("127.0.0.1:6379x", ""),
        ("127.0.0.1:70000", ""),
    ],
)
def test_an_address_without_a_cluster_is_refused(address: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "ANSWER_SECONDS", 1.0)
    with socket.socket() as silent, socket.socket() as closed:
        for each in (silent, closed):
            each.bind(("", 0))
        silent.listen()
        address = address.format(silent=silent.getsockname()[1], closed=closed.getsockname()[1])
        with pytest.raises(ConfigError) as caught:
            with ray_session(address=address, cpus=1):
                pass
    told = f"cluster.address: no Ray cluster at '{address}' ({why}"
    assert caught.value.message.startswith(told) and caught.value.message.endswith(
        "; set it to the host:port printed by `ray start --head`, or leave it empty to start Ray on this machine"
    )


def test_a_directory_that_ray_cannot_write_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    with pytest.raises(CorerlError) as caught:
        with ray_session(address="", cpus=1):
            pass
    assert re.fullmatch(
        rf"cannot start Ray on this machine: \[Errno 20\] Not a directory: '{tmp_path}/file/ray'; Ray writes to "
        rf"{tmp_path}/file \(.* GiB free; set RAY_TMPDIR to change it\) and logs to ray/session_latest/logs in it; .*",
        caught.value.message,
    )


@pytest.mark.parametrize(
    ("errors", "starts", "said"),
    [
        (["The current node timed out during startup."], 2, ""),
        (["The current node timed out during startup."] * 2, 2, "The current node timed out during startup."),
        (["Timed out after 30 seconds while waiting for node to startup."], 2, ""),
        (["No space left on device"], 1, "No space left on device"),
    ],
)
def test_a_start_of_ray_that_times_out_is_repeated_once(
    monkeypatch: pytest.MonkeyPatch, errors: list[str], starts: int, said: str
) -> None:
    asked: list[dict[str, object]] = []

    def init(**options: object) -> None:
        asked.append(options)
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


DEMANDS = "demands a token that this process does not have; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to what "


def test_a_cluster_with_another_token_names_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", mock.Mock())
    answer = subprocess.CompletedProcess([], 1, "", f"Traceback (most recent call last):\n{UNAUTHENTICATED}\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(ConfigError) as caught:
        with ray_session(address="10.0.0.1:6379", cpus=1):
            raise AssertionError("there is no session")
    assert caught.value.message.startswith(f"cluster.address: the Ray cluster at '10.0.0.1:6379' {DEMANDS}")
    assert "get-auth-token" in caught.value.message and "\n" not in caught.value.message


def test_a_token_refused_by_the_session_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError(UNAUTHENTICATED)

    monkeypatch.setattr(runtime, "_require_answering", id)
    monkeypatch.setattr(runtime, "_init", refuse)
    with pytest.raises(ConfigError, match=DEMANDS):
        with ray_session(address="10.0.0.1:6379", cpus=1):
            raise AssertionError("there is no session")
