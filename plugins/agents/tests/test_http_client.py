"""Requests of another process, against the server itself."""

from __future__ import annotations

import asyncio
import threading

import pytest

from corerl_agents.chat_requests import ChatAnswer, ChatRequest, OnPiece
from corerl_agents.chat_server import ChatServer
from corerl_agents.http_client import HttpClient
from plugins.agents.tests.test_chat_server import TOOLS, USER, Desk
from tests.machine import paced


def test_it_answers_as_the_server_itself(front: ChatServer) -> None:
    client, url = HttpClient(), front.open(Desk())
    for body in (
        {"messages": [USER], "tools": TOOLS},
        {"messages": [USER], "stream": True},
        {"messages": [USER], "n": 2},
    ):
        here, there = front.ask(url, body).result(), client.ask(url, body).result(paced(20))
        assert {**there, "id": "", "created": 0} == {**here, "id": "", "created": 0}
    (idle,) = client._idle.values()
    assert len(idle) == 1  # one connection, one request after the other
    idle[0].close()
    with pytest.raises(TypeError, match="not JSON serializable"):
        client.ask(url, {"messages": [USER], "max_tokens": object()})


def test_whoever_cancels_is_a_client_that_has_gone(front: ChatServer) -> None:
    begun, gone = threading.Event(), threading.Event()

    async def answering(request: ChatRequest, on_piece: OnPiece) -> ChatAnswer:
        begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            gone.set()
            raise
        return await Desk()(request, on_piece)

    answer = HttpClient().ask(front.open(answering), {"messages": [USER]})
    assert begun.wait(paced(20)) and answer.cancel()
    assert gone.wait(paced(20))


def test_a_server_that_is_gone_raises_in_the_client() -> None:
    with pytest.raises(ConnectionRefusedError):
        HttpClient().ask("http://127.0.0.1:1/name/v1", {"messages": [USER]}).result(paced(20))
