"""Over real HTTP, in the shapes that OpenAI's API documents."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from corerl.rollout.agents.chat_server import ChatAnswer, ChatRequest, ChatServer
from corerl.rollout.agents.conversation import Refused
from tests.machine import paced

USER = {"role": "user", "content": "hello"}


class Desk:
    """Answers all requests alike, and keeps them."""

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []
        self.refuses = False
        self.tool_calls: list[dict[str, Any]] = []

    def __call__(self, request: ChatRequest) -> ChatAnswer:
        self.requests.append(request)
        if self.refuses:
            raise Refused("not now", status=410, code="episode_over")
        if self.tool_calls:
            return ChatAnswer(
                text="",
                tool_calls=self.tool_calls,
                finish_reason="tool_calls",
                prompt_tokens=5,
                tokens=["x"],
                logprobs=[-1.0],
            )
        return ChatAnswer(
            text="hi ü", finish_reason="stop", prompt_tokens=5, tokens=["hi", "ü", "<eos>"], logprobs=[-1.0, -0.5, 0.0]
        )


@pytest.fixture
def front() -> Iterator[ChatServer]:
    made = ChatServer(temperature=0.7, top_p=1.0)
    yield made
    made.close()


def post(url: str, body: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=paced(20))
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", urlsplit(url).path, content, {"Authorization": "Bearer none"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def test_an_answer_has_the_shape_of_a_chat_completion(front: ChatServer) -> None:
    desk = Desk()
    url = front.open(desk) + "/chat/completions"
    asked = {"model": "any", "messages": [USER], "logprobs": True, "temperature": 0.7, "n": 1, "stream": False}
    status, answer = post(url, {**asked, "max_completion_tokens": 7, "stop": "x", "tools": [{"type": "function"}]})
    assert status == 200
    assert (answer["object"], answer["model"]) == ("chat.completion", "policy")
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hi ü"}
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    assert choice["logprobs"]["content"][1] == {
        "token": "ü",
        "logprob": -0.5,
        "bytes": [195, 188],
        "top_logprobs": [],
    }
    (request,) = desk.requests
    assert (request.max_tokens, list(request.stop), request.logprobs) == (7, ["x"], True)
    assert (list(request.messages), list(request.tools)) == ([USER], [{"type": "function"}])
    assert post(url, {"messages": [USER], "presence_penalty": 0.0, "stop": None})[1]["choices"][0]["logprobs"] is None
    assert (desk.requests[1].max_tokens, list(desk.requests[1].stop)) == (None, [])


def test_calls_of_tools_stand_beside_the_text_which_is_null_where_there_is_none(front: ChatServer) -> None:
    desk = Desk()
    desk.tool_calls = [{"id": "call00100", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    body = {"messages": [USER], "tools": [{"type": "function"}], "parallel_tool_calls": True, "tool_choice": "auto"}
    (choice,) = post(front.open(desk) + "/chat/completions", body)[1]["choices"]
    assert choice["message"] == {"role": "assistant", "content": None, "tool_calls": desk.tool_calls}
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "the request is not valid JSON"),
        (b"[" * 200_000, "the request is not valid JSON: it is nested more deeply than can be read"),
        (
            rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
            "the request is not valid JSON: a text in it has half",
        ),
        ({}, "messages: missing"),
        ({"messages": [USER], "stream": True}, "stream: got True, wanted False; leave it out"),
        ({"messages": [USER], "n": 2}, "n: got 2, wanted 1; leave it out"),
        ({"messages": [USER], "temperature": 1.0}, "temperature: got 1.0, but this run samples with rollout.temperatu"),
        ({"messages": [USER], "top_p": 0.5}, "top_p: got 0.5, but this run samples with rollout.top_p=1.0"),
        ({"messages": [USER], "top_k": 5}, "top_k: got 5, but this run samples with rollout.top_k=0"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, "response_format: got {'type'"),
        ({"messages": [USER], "tool_choice": "required"}, "tool_choice: got 'required', wanted 'auto'; leave it out"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens: got [0], wanted a whole number of at least 1"),
        ({"messages": [USER], "stop": [3]}, "stop: got [3], wanted a list of strings"),
        ({"messages": [USER], "tools": {"a": 1}}, "tools: got {'a': 1}, wanted a list of objects"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(front: ChatServer, body: Any, told: str) -> None:
    desk = Desk()
    status, answer = post(front.open(desk) + "/chat/completions", body)
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith(told)
    assert not desk.requests


def test_each_conversation_has_a_base_url_of_its_own_until_it_is_shut(front: ChatServer) -> None:
    first, second = Desk(), Desk()
    urls = [front.open(first), front.open(second)]
    assert post(urls[1] + "/chat/completions", {"messages": [USER]})[0] == 200
    assert (len(first.requests), len(second.requests)) == (0, 1)
    second.refuses = True
    status, answer = post(urls[1] + "/chat/completions", {"messages": [USER]})
    assert (status, answer["error"]["code"], answer["error"]["message"]) == (410, "episode_over", "not now")
    assert post(urls[0] + "/completions", {"prompt": "x"})[0] == 404
    front.shut(urls[0])
    status, answer = post(urls[0] + "/chat/completions", {"messages": [USER]})
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert not first.requests


def test_what_breaks_as_it_answers_is_told_to_whoever_asked_and_where_it_broke_to_whoever_runs_it(
    front: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(request: ChatRequest) -> ChatAnswer:
        raise KeyError("tool_call_id")

    status, answer = post(front.open(breaks) + "/chat/completions", {"messages": [USER]})
    assert (status, answer["error"]["message"]) == (500, "KeyError: 'tool_call_id'")
    assert "in breaks\n" in capsys.readouterr().err


def test_the_client_asks_over_connections_that_it_keeps(front: ChatServer) -> None:
    url = urlsplit(front.open(Desk()))
    before = [front.client.post(f"{url.path}/chat/completions", {"messages": [USER]})["id"] for _ in range(2)]
    assert len(set(before)) == 2
    assert len(front.client._idle) == 1
