"""Streams that come in pieces, put together by the official clients, and streams that break off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from corerl.rollout import EventLoop
from corerl_agents.chat_requests import ChatAnswer, ChatRequest, OnPiece, Piece
from corerl_agents.chat_server import ChatServer
from corerl_agents.refused import Refused
from plugins.agents.tests.clients import of_anthropic, of_openai, openai

CALL = {"id": "call00100", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
ASKED: dict[str, Any] = {"model": "any"}
USER: Any = {"role": "user", "content": "hello"}
TEXTS = [("I th", ""), ("I think", ""), ("I think.", "It"), ("I think.", "It is")]  # reasoning and content so far


async def in_pieces(request: ChatRequest, on_piece: OnPiece) -> ChatAnswer:
    for tokens, (reasoning, text) in enumerate(TEXTS):
        on_piece(Piece(text=text, reasoning=reasoning, prompt_tokens=5, tokens=tokens))
    ids = {"prompt_token_ids": np.arange(5), "token_ids": np.arange(4)}
    return ChatAnswer(text="It is 5.", reasoning="I think.", tool_calls=[CALL], finish_reason="tool_calls", **ids)


async def breaks(request: ChatRequest, on_piece: OnPiece) -> ChatAnswer:
    on_piece(Piece(text="It", prompt_tokens=5, tokens=1))
    raise Refused("the episode is over", status=410, code="episode_over")


@pytest.fixture(scope="module")
def server(loop: EventLoop) -> Iterator[ChatServer]:
    made = ChatServer(loop, temperature=1.0, top_p=1.0)
    yield made
    made.close()


def test_chunks_of_chat_completions_add_up(server: ChatServer) -> None:
    with of_openai(server.open(in_pieces)) as ours:
        chunks = list(ours.chat.completions.create(messages=[USER], stream=True, **ASKED))
    deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks]
    assert [delta.get("content") for delta in deltas] == [None, None, "It", " is", " 5."]
    assert [delta.get("reasoning_content") for delta in deltas] == ["I th", "ink", ".", None, None]
    assert [delta.get("role") for delta in deltas] == ["assistant", None, None, None, None]
    assert deltas[-1]["tool_calls"] == [{"index": 0, **CALL}]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["tool_calls"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_events_of_messages_add_up(server: ChatServer) -> None:
    asked: dict[str, Any] = {**ASKED, "max_tokens": 9, "messages": [USER]}
    with of_anthropic(server.open(in_pieces).removesuffix("/v1")) as ours:
        with ours.messages.stream(**asked) as stream:
            events = list(stream)
            streamed = stream.get_final_message()
        whole = ours.messages.create(**asked)
    assert [each.to_dict() for each in streamed.content] == [each.to_dict() for each in whole.content]
    assert (streamed.stop_reason, streamed.usage.output_tokens, streamed.usage.input_tokens) == ("tool_use", 4, 5)
    assert [each.text for each in events if each.type == "text"] == ["It", " is", " 5."]
    assert [each.thinking for each in events if each.type == "thinking"] == ["I th", "ink", "."]


def test_events_of_responses_add_up(server: ChatServer) -> None:
    with of_openai(server.open(in_pieces)) as ours:
        with ours.responses.stream(input="hello", **ASKED) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
        whole = ours.responses.create(input="hello", **ASKED)
    assert streamed.output_text == whole.output_text == "It is 5."
    assert [each.delta for each in events if each.type == "response.output_text.delta"] == ["It", " is", " 5."]
    assert [each.delta for each in events if each.type == "response.reasoning_text.delta"] == ["I th", "ink", "."]
    done = [each.item.type for each in events if each.type == "response.output_item.done"]
    assert done == [each.type for each in whole.output] == ["reasoning", "message", "function_call"]
    indices = [each.output_index for each in events if each.type == "response.output_item.added"]
    assert indices == [0, 1, 2] and [each.sequence_number for each in events] == list(range(len(events)))


def test_a_stream_that_breaks_off_ends_with_the_reason(server: ChatServer) -> None:
    refusals: list[str] = []
    url = server.open(breaks, refusals.append)
    with of_openai(url) as ours:
        with pytest.raises(openai.APIError, match="^the episode is over$"):
            list(ours.chat.completions.create(messages=[USER], stream=True, **ASKED))
        *_, last = ours.responses.create(input="hello", stream=True, **ASKED)  # it raises nothing for this event
        assert last.type == "error" and (last.code, last.message) == ("episode_over", "the episode is over")
    with of_anthropic(url.removesuffix("/v1")) as ours, pytest.raises(Exception, match="the episode is over") as broken:
        list(ours.messages.create(max_tokens=9, messages=[USER], stream=True, **ASKED))
    assert type(broken.value).__module__.startswith("anthropic")
    assert refusals == ["the episode is over"] * 3
