"""Requests of another process, against the server itself."""

from __future__ import annotations

import pytest

from corerl_agents.chat_server import ChatServer
from corerl_agents.http_client import HttpClient
from plugins.agents.tests.test_chat_server import TOOLS, USER, Desk
from tests.machine import paced


def test_it_answers_as_the_server_itself(front: ChatServer) -> None:
    client, url = HttpClient(), front.open(Desk())
    for more in ({"tools": TOOLS, "logprobs": True}, {"n": 2}):
        body = {"messages": [USER], **more}
        here, there = front.ask(url, body).result(), client.ask(url, body).result(paced(20))
        assert {**there, "id": "", "created": 0} == {**here, "id": "", "created": 0}
    (idle,) = client._idle.values()
    assert len(idle) == 1  # one connection, one request after the other
    idle[0].close()
    with pytest.raises(TypeError, match="not JSON serializable"):
        client.ask(url, {"messages": [USER], "max_tokens": object()})
