"""Messages with Anthropic's own client, over the loopback, in an episode whose answers are scripted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from corerl.data import Prompt
from corerl_agents import scripted
from corerl_agents.chat_requests import ChatRequest
from corerl_agents.config import EpisodesConfig
from corerl_agents.dialects.messages import read_request
from corerl_agents.refused import Refused
from plugins.agents.tests.clients import of_anthropic
from tests.later import Later, wants

anthropic: Any = Later("anthropic")
pytestmark = wants("anthropic")
PROMPT = Prompt(index=0, text="What is 2 + 3?", answer="5")
USER: Any = {"role": "user", "content": "What is 2 + 3?"}
ADD: Any = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": "ü"}}</tool_call>'
THOUGHT = f"<think>I add.</think>I call.\n{CALL}"


def read(**fields: Any) -> ChatRequest:
    return read_request(json.dumps({"messages": [USER], **fields}), {"temperature": 1.0})


def test_a_conversation_with_a_tool_is_one_row() -> None:
    separate, answers = EpisodesConfig(reasoning="separate"), [THOUGHT, "It is 5"]
    with scripted(PROMPT, answers, options=separate) as script, of_anthropic(script.episode.anthropic_url) as ours:
        messages: list[Any] = [USER]
        asked: dict[str, Any] = {"model": "any", "max_tokens": 4096, "system": "You add.", "tools": [ADD]}
        shown = {name: asked[name] for name in ("model", "system", "tools")}
        counted = ours.messages.count_tokens(messages=messages, **shown)
        first = ours.messages.create(messages=messages, **asked)
        assert counted.input_tokens == first.usage.input_tokens
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        thought, text, call = first.content
        assert thought.type == "thinking" and thought.thinking == "I add."
        assert text.type == "text" and text.text == "I call."
        assert call.type == "tool_use" and (call.name, call.input) == ("add", {"a": 2, "b": "ü"})
        assert (first.stop_reason, first.stop_sequence, first.role) == ("tool_use", None, "assistant")
        assert first.usage.output_tokens == len(THOUGHT.encode()) + 1
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "5"}]}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = ours.messages.create(messages=messages, **asked)
        assert [block.to_dict() for block in second.content] == [{"type": "text", "text": "It is 5"}]
        assert second.stop_reason == "end_turn"
        ((before, said, between, last),) = script.rows
    shown = "system: You add.<|end|>\nuser: What is 2 + 3?<|end|>\nassistant: "
    assert before[0].startswith("tools: ") and before[0].endswith(shown)
    assert (said, last) == ((f"{THOUGHT}<|end|>", True), ("It is 5<|end|>", True))
    assert between == ("\ntool: 5<|end|>\nassistant: ", False)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_what_has_ended_it(stream: bool) -> None:
    with scripted(PROMPT, ["I add. ### It"] * 4) as script, of_anthropic(script.episode.anthropic_url) as ours:
        ended = []
        for texts, most in ((["!", "###", "add. ##"], 99), (["###"], 99), (["It is"], 99), ([], 3)):
            asked: dict[str, Any] = {"model": "any", "max_tokens": most, "messages": [USER], "stop_sequences": texts}
            if stream:
                with ours.messages.stream(**asked) as events:
                    ended.append(events.get_final_message())
            else:
                ended.append(ours.messages.create(**asked))
    assert [(each.stop_reason, each.stop_sequence, each.content[0].text) for each in ended] == [
        *(("stop_sequence", "add. ##", "I "), ("stop_sequence", "###", "I add. ")),
        *(("end_turn", None, "I add. ### It"), ("max_tokens", None, "I a")),
    ]
    assert ended[-1].usage.output_tokens == 3


def test_errors_have_anthropics_shape() -> None:
    with scripted(PROMPT, []) as script, of_anthropic(script.episode.anthropic_url) as ours:
        with pytest.raises(anthropic.BadRequestError) as refused:
            ours.messages.create(model="any", max_tokens=3, messages=[USER], tool_choice={"type": "any"}, tools=[ADD])
        error = refused.value.body["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("tool_choice: got {'type': 'any'}, wanted an object of ")
        with pytest.raises(anthropic.NotFoundError):
            ours.post("/v1/nothing", cast_to=object)


def test_blocks_are_read_as_messages_of_a_conversation() -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    text = {"type": "text", "text": "and", "cache_control": {"type": "ephemeral"}}
    results = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in ("a", "b")]
    said = [
        {"type": "thinking", "thinking": "I think.", "signature": "x"},
        {"type": "text", "text": "I call."},
        {"type": "tool_use", "id": "a", "name": "add", "input": {"a": 1}},
    ]
    asked = read(
        system=[text],
        messages=[
            {"role": "user", "content": [text, picture]},
            {"role": "assistant", "content": said},
            {"role": "user", "content": [results[0], text, results[1]]},
        ],
        tools=[{**ADD, "strict": True}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        stop_sequences=["###"],
    )
    part = {"type": "text", "text": "and"}
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert asked.messages == [
        {"role": "system", "content": [part]},
        {"role": "user", "content": [part, shown]},
        {"role": "assistant", "content": "I call.", "reasoning_content": "I think.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "a"},
        {"role": "tool", "tool_call_id": "b", "content": "b"},
        {"role": "user", "content": [part]},
    ]
    function = {"name": "add", "description": "adds", "parameters": ADD["input_schema"]}
    assert asked.tools == [{"type": "function", "function": function}]
    assert (asked.most_calls, asked.stop, read(tool_choice={"type": "none"}).most_calls) == (1, ["###"], 0)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": ["x"]}, r"messages\[0\]: got 'x', wanted an object"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, r"messages\[0\].content\[0\]: got "),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, r"messages\[0\].content\[0\]: got "),
        ({"system": [{"type": "image"}, 3]}, r"system: got "),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].type: got 'web_search_2025"),
        ({"tools": [{"name": 3}]}, r"tools\[0\].name: got 3, wanted a string"),
        ({"tools": [{"name": "a", "defer_loading": True}]}, r"tools\[0\].defer_loading: got True, wanted no such"),
    ],
)
def test_what_cannot_be_shown_to_the_model_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(Refused, match=f"^{told}"):
        read(**fields)
