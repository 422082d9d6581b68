"""Responses with OpenAI's own client, over the loopback, in an episode whose answers are scripted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from corerl.data import Prompt
from corerl_agents import scripted
from corerl_agents.chat_requests import ChatRequest
from corerl_agents.config import EpisodesConfig
from corerl_agents.dialects.responses import read_request
from corerl_agents.refused import Refused
from plugins.agents.tests.clients import of_openai

PROMPT = Prompt(index=0, text="What is 2 + 3?", answer="5")
ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": True}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": "ü"}}</tool_call>'
THOUGHT = f"<think>I add.</think>I call.\n{CALL}"


def read(**fields: Any) -> ChatRequest:
    return read_request(json.dumps({"input": "hello", **fields}), {"temperature": 1.0})


def test_a_conversation_with_a_tool_is_one_row() -> None:
    separate = EpisodesConfig(reasoning="separate")
    with scripted(PROMPT, [THOUGHT, "It is 5"], options=separate) as script, of_openai(script.episode.base_url) as ours:
        items: list[Any] = [{"role": "user", "content": PROMPT.text}]
        asked: dict[str, Any] = {"model": "any", "instructions": "You add.", "tools": [ADD]}
        first = ours.responses.create(input=items, **asked)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        call = first.output[2]
        assert call.type == "function_call" and (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": "ü"})
        assert (first.status, first.output_text) == ("completed", "I call.")
        assert first.usage is not None and first.usage.output_tokens == len(THOUGHT.encode()) + 1
        items += [item.to_dict() for item in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
        second = ours.responses.create(input=items, include=["message.output_text.logprobs"], **asked)
        assert second.output_text == "It is 5"
        (message,) = second.output
        assert message.type == "message" and message.content[0].type == "output_text"
        assert [each.logprob for each in message.content[0].logprobs or ()] == [0.0] * 8
        ((before, said, between, last),) = script.rows
    assert before[0].endswith("system: You add.<|end|>\nuser: What is 2 + 3?<|end|>\nassistant: ")
    assert (said, last) == ((f"{THOUGHT}<|end|>", True), ("It is 5<|end|>", True))
    assert between == ("\ntool: 5<|end|>\nassistant: ", False)


def test_an_answer_that_is_cut_is_incomplete() -> None:
    with scripted(PROMPT, ["It is 5"]) as script, of_openai(script.episode.base_url) as ours:
        cut = ours.responses.create(model="any", max_output_tokens=3, input=PROMPT.text)
    assert (cut.status, cut.output_text) == ("incomplete", "It ")
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"


def test_items_are_read_as_messages_of_a_conversation() -> None:
    shown = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:,"}]
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": shown},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "I think."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I call."}]},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "message", "role": "assistant", "content": "It is"},
        {"type": "message", "role": "assistant", "content": "3"},
    ]
    calls = [{"id": each, "type": "function", "function": {"name": "add", "arguments": "{}"}} for each in "ab"]
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert read(input=items, instructions="You add.").messages == [
        {"role": "system", "content": "You add."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, picture]},
        {"role": "assistant", "content": "I call.", "reasoning_content": "I think.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "2"}]},
        {"role": "assistant", "content": "It is"},
        {"role": "assistant", "content": "3"},
    ]
    function = {"name": "add", "parameters": ADD["parameters"]}
    assert read(tools=[ADD]).tools == [{"type": "function", "function": function}]
    assert [read(**each).most_calls for each in ({"tool_choice": "none"}, {"parallel_tool_calls": False})] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"input": None}, "input: missing; send a string or a list of items"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].type: got 'item_reference', wanted"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, r"input\[0\].content\[0\]: got "),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type: got 'web_search', wanted 'function': it is a service"),
        ({"tools": [{"type": "function", "name": "a", "defer_loading": True}]}, r"tools\[0\].defer_loading: got True"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: got 'resp_1', wanted no such field: the server"),
    ],
)
def test_what_cannot_be_shown_to_the_model_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(Refused, match=f"^{told}"):
        read(**fields)
