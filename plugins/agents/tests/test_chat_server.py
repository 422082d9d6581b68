"""With OpenAI's own client, and with the same requests without a socket."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from corerl.rollout import EventLoop
from corerl_agents.chat_requests import ChatAnswer, ChatRequest, OnPiece
from corerl_agents.chat_server import ChatServer
from corerl_agents.refused import Refused
from plugins.agents.tests.clients import connected, of_openai, post, sent
from tests.machine import paced

USER: Any = {"role": "user", "content": "hello"}
TOOLS: Any = [{"type": "function", "function": {"name": "add"}}]
CALLED = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
CALLS = [{"id": f"call0010{index}", **CALLED} for index in range(2)]


class Desk:
    """Answers all requests alike, and keeps them."""

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []
        self.threads: set[str] = set()
        self.refuses = False

    async def __call__(self, request: ChatRequest, on_piece: OnPiece) -> ChatAnswer:
        self.requests.append(request)
        self.threads.add(threading.current_thread().name)
        if self.refuses:
            raise Refused("not now", status=410, code="episode_over")
        return ChatAnswer(
            text="" if request.tools else "hi ü",
            tool_calls=CALLS if request.tools else (),
            finish_reason="tool_calls" if request.tools else "stop",
            prompt_token_ids=np.array([7, 8, 9, 7, 8]),
            token_ids=np.array([3, 4, 2]),
            tokens=["hi", "ü", "\ufffd"],
            logprobs=[-1.0, -0.5, 0.0],
        )


@pytest.fixture(scope="module")
def front(loop: EventLoop) -> Iterator[ChatServer]:
    made = ChatServer(loop, temperature=0.7, top_p=1.0)
    yield made
    made.close()


@pytest.mark.parametrize(("address", "host"), [("127.0.0.2", "127.0.0.2"), ("::1", "[::1]")])
def test_a_server_listens_at_its_address_alone(loop: EventLoop, address: str, host: str) -> None:
    server = ChatServer(loop, temperature=1.0, top_p=1.0, address=address)
    url = server.open(Desk())
    port = urlsplit(url).port
    assert url.startswith(f"http://{host}:{port}/")
    assert post(url + "/chat/completions", {"messages": [USER]})[0] == 200
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port or 0))
    server.close()


def test_openais_client_reads_an_answer(front: ChatServer) -> None:
    desk = Desk()
    with of_openai(front.open(desk)) as ours:
        answer = ours.chat.completions.create(
            model="any",
            messages=[USER],
            logprobs=True,
            temperature=0.7,
            max_completion_tokens=7,
            stop="x",
            extra_body={"return_token_ids": True},
        )
    assert (answer.object, answer.model) == ("chat.completion", "policy")
    assert answer.usage is not None
    assert answer.usage.to_dict() == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.message.tool_calls) == ("assistant", "hi ü", None)
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    _, second, third = choice.logprobs.content
    assert second.to_dict() == {"token": "ü", "logprob": -0.5, "bytes": [195, 188], "top_logprobs": []}
    assert third.bytes is None  # of a token that ends within a character
    assert answer.to_dict()["prompt_token_ids"] == [7, 8, 9, 7, 8] and choice.to_dict()["token_ids"] == [3, 4, 2]
    (request,) = desk.requests
    assert (request.max_tokens, list(request.stop), list(request.messages)) == (7, ["x"], [USER])
    assert desk.threads == {"tested"}


def test_openais_client_reads_a_stream_of_one_chunk(front: ChatServer) -> None:
    with of_openai(front.open(Desk())) as ours:
        asked: dict[str, Any] = {"model": "policy", "messages": [USER], "stream": True}
        text, usage = ours.chat.completions.create(**asked, stream_options={"include_usage": True})
        (calls,) = ours.chat.completions.create(**asked, tools=TOOLS, extra_body={"return_token_ids": True})
    first = text.choices[0]
    assert (text.object, first.delta.content, first.finish_reason) == ("chat.completion.chunk", "hi ü", "stop")
    assert text.usage is None and usage.choices == [] and usage.id == text.id
    assert usage.usage is not None and usage.usage.total_tokens == 8
    delta = calls.choices[0].delta.to_dict()
    assert delta["tool_calls"] == [{"index": index, **call} for index, call in enumerate(CALLS)]
    assert calls.choices[0].finish_reason == "tool_calls" and calls.choices[0].to_dict()["token_ids"] == [3, 4, 2]
    assert calls.to_dict()["prompt_token_ids"] == [7, 8, 9, 7, 8]


def test_a_call_without_http_is_a_clients(front: ChatServer) -> None:
    desk, refusals = Desk(), list[str]()
    url = front.open(desk, refusals.append)
    assert front.ask(url, {"messages": [USER], "n": 2}).result()["error"]["message"] == refusals[0]
    messages = [dict(USER)]
    said = front.ask(url, {"messages": messages, "tools": TOOLS}).result()
    messages[0]["content"] = said["choices"][0]["message"]["tool_calls"][0]["id"] = "other"
    assert desk.requests[-1].messages == [USER] and CALLS[0]["id"] == "call00100"
    with pytest.raises(TypeError, match="not JSON serializable"):
        front.ask(url, {"messages": [USER], "max_tokens": np.int64(3)})


def test_an_error_has_openais_shape(front: ChatServer) -> None:
    first, second = Desk(), Desk()
    urls = [front.open(first), front.open(second)]
    assert post(urls[1] + "/chat/completions", {"messages": [USER]})[0] == 200
    assert (len(first.requests), len(second.requests)) == (0, 1)
    second.refuses = True
    expected = {"message": "not now", "type": "invalid_request_error", "param": None, "code": "episode_over"}
    assert post(urls[1] + "/chat/completions", {"messages": [USER]}) == (410, {"error": expected})
    front.shut(urls[0])
    asked = post(urls[0] + "/chat/completions", {"messages": [USER]})
    for status, answer in (asked, post(urls[0] + "/models", None, "GET")):
        assert (status, answer["error"]["code"]) == (404, "not_found")
        assert "no running episode has this URL; send requests to an" in answer["error"]["message"]
    assert front.ask(urls[0], {"messages": [USER]}).result()["error"]["code"] == "not_found"
    assert not first.requests


@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyError("tool_call_id"), "KeyError: 'tool_call_id'"), (SystemExit("no\nway"), "SystemExit: no")],
)
def test_a_broken_answer_is_reported_to_client_and_user(
    front: ChatServer, capfd: pytest.CaptureFixture[str], error: BaseException, told: str
) -> None:
    async def breaks(request: ChatRequest, on_piece: OnPiece) -> ChatAnswer:
        raise error

    status, answer = post(front.open(breaks) + "/chat/completions", {"messages": [USER]})
    assert (status, answer["error"]["message"]) == (500, told)
    assert capfd.readouterr().err.count("in breaks\n") == 1
    assert front.ask(front.open(Desk()), {"messages": [USER]}).result()["choices"]  # it still serves


def test_it_serves_this_machine_alone_until_closed(loop: EventLoop, capfd: pytest.CaptureFixture[str]) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    made = ChatServer(loop, temperature=1.0, top_p=1.0)
    url = made.open(Desk())
    connection, sockets = connected(url), set()
    for _ in range(2):
        assert sent(connection, url + "/chat/completions", {"messages": [USER]})[0] == 200
        sockets.add(connection.sock)
    assert len(sockets) == 1  # which is kept
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", urlsplit(url).port or 0), timeout=paced(20))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    made.close()
    made.close()
    connection.close()
    with pytest.raises(ConnectionRefusedError):
        connected(url).connect()
    assert capfd.readouterr() == ("", "")

    async def closes() -> None:
        ChatServer(loop, temperature=1.0, top_p=1.0).close()

    loop.run(closes())
    own_loop = EventLoop("short")
    left = ChatServer(own_loop, temperature=1.0, top_p=1.0)
    url = left.open(Desk())
    own_loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        left.ask(url, {"messages": [USER]})
    left.close()


def test_a_client_that_leaves_cancels_its_answer_alone(front: ChatServer, capfd: pytest.CaptureFixture[str]) -> None:
    begun, gone = threading.Event(), threading.Event()

    async def answering(request: ChatRequest, on_piece: OnPiece) -> ChatAnswer:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            gone.set()
            raise
        return await Desk()(request, on_piece)

    url = front.open(answering)
    connection = connected(url)
    connection.request("POST", f"{urlsplit(url).path}/chat/completions", json.dumps({"messages": [USER]}))
    assert begun.wait(paced(20))
    assert post(f"{url}/models", None, "GET")[0] == 200 and not gone.is_set()
    connection.close()
    assert gone.wait(paced(20))
    assert post(f"{url}/models", None, "GET")[0] == 200
    front.shut(url)
    assert capfd.readouterr() == ("", "")
