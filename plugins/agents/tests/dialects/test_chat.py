"""Bodies of Chat Completions as clients send them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from corerl_agents.chat_requests import ChatRequest
from corerl_agents.dialects.chat import read_request
from corerl_agents.refused import Refused

USER = {"role": "user", "content": "hello"}
RUN = {"temperature": 0.7, "top_p": 1.0, "top_k": 0}
TOOL = {"type": "function", "function": {"name": "add"}}


def read(**fields: Any) -> ChatRequest:
    return read_request(json.dumps({"messages": [USER], **fields}).encode(), RUN)


def test_fields_with_two_names_are_read_by_both() -> None:
    assert read() == ChatRequest(messages=[USER])
    limits = [read(max_tokens=7), read(max_completion_tokens=7), read(max_tokens=9, max_completion_tokens=7)]
    assert [request.max_tokens for request in limits] == [7, 7, 7]
    assert [read(stop=stop).stop for stop in ("x", ["x", "yz"], None)] == [["x"], ["x", "yz"], ()]
    choices = [{}, {"tool_choice": "auto", "parallel_tool_calls": True}, {"parallel_tool_calls": False}]
    choices += [{"tool_choice": "none"}, {"tool_choice": "none", "parallel_tool_calls": True}]
    assert [read(tools=[TOOL], **choice).most_calls for choice in choices] == [None, None, 1, 0, 0]
    assert read(chat_template_kwargs={"brief": True}).template_options == {"brief": True}
    written = read(logprobs=True, return_token_ids=True, stream=True, stream_options={"include_usage": True})
    assert (written.logprobs, written.token_ids, written.stream, written.stream_usage) == (True, True, True, True)
    assert read(user="me", seed=3) == read() != read(max_tokens=7)  # the same answer


def test_sampling_from_all_tokens_may_be_written_as_minus_one() -> None:
    for name, value in (("top_k", False), ("top_p", True)):  # which are no numbers
        with pytest.raises(Refused, match=f"^{name}: got {value}, but this run samples with rollout.{name}="):
            read(**{name: value})
    body = json.dumps({"messages": [USER], "top_k": -1}).encode()
    assert read_request(body, RUN) == read()
    with pytest.raises(Refused, match="^top_k: got -1, but this run samples with rollout.top_k=5"):
        read_request(body, {**RUN, "top_k": 5})  # it would be from all


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "the request is not valid JSON"),
        (b"[" * 200_000, "the request is not valid JSON: it is nested more deeply than can be read"),
        (rb'{"messages": [{"role": "user", "content": "\ud800"}]}', "the request is not valid JSON: a text in it has"),
        (b"{}", "messages: missing"),
        (b"[]", "messages: missing"),
        (b'{"messages": {}}', "messages: missing or not a list; send a list of messages"),
    ],
)
def test_a_body_that_is_no_request_is_refused(body: bytes, told: str) -> None:
    with pytest.raises(Refused, match=f"^{re.escape(told)}"):
        read_request(body, RUN)
