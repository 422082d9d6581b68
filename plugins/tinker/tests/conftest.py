"""A server over loopback with a policy of one number, and the SDK's client of it."""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections.abc import Iterator

import pytest
from attrs import frozen

from corerl import Engines
from corerl_tinker.app import Server
from corerl_tinker.options import ServeOptions
from corerl_tinker.training import ServedPolicy
from plugins.tinker.tests.policies import NAME, OneNumber

os.environ["TINKER_TELEMETRY"] = "0"  # or the SDK would send what these tests do
platform.processor()  # asks a program once, which the SDK would otherwise do in a test
KEY = "tml-a-key-of-these-tests"


@frozen(kw_only=True, eq=False)
class Served:
    """A server that runs."""

    policy: OneNumber
    server: Server
    url: str
    notices: list[str]


def start(policy: ServedPolicy, options: ServeOptions, notices: list[str]) -> tuple[Server, threading.Thread, str]:
    """A server on a free port, whose group's thread is named so."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = Server(policy, options, key=KEY, listening=listening, notify=notices.append)
    thread = threading.Thread(target=server.run, name="group")
    thread.start()
    return server, thread, f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The copies that engines are sent, "" for the weights as they are."""
    sent, push = list[str](), Engines.push

    def noted(self: Engines, *, snapshot: str, forget: int | None) -> int:
        sent.append(snapshot)
        return push(self, snapshot=snapshot, forget=forget)

    monkeypatch.setattr(Engines, "push", noted)
    return sent


@pytest.fixture
def served() -> Iterator[Served]:
    policy, notices = OneNumber(), list[str]()
    options = ServeOptions(name=NAME, aliases=("other/name",))
    server, thread, url = start(policy, options, notices)
    yield Served(policy=policy, server=server, url=url, notices=notices)
    policy.hold.set()
    server.http.should_exit = server.http.force_exit = True
    thread.join()
    policy.directory.cleanup()
