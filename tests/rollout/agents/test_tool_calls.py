"""Calls as models write them, and as templates teach them."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest

from corerl.config.schema import EpisodesConfig
from corerl.rollout.agents.tool_calls import FORMATS, as_told, format_of, meant

ADD = {"name": "add", "arguments": {"a": 2, "b": [3, "x; {"]}}
GET = {"name": "get", "arguments": {}}
# As Qwen 2.5 and 3, Hermes 3 and Llama 3.1 have them, the first as Jinja writes a string.
TAUGHT = {
    r"XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>": "hermes",
    "tags:\n<tool_call>\n{'name'...}<tool_call>\n{\"name\": <function-name>": "hermes",
    'in the format {"name": function name, "parameters": dictionary of argument name and its value}.': "llama-json",
    r"XML tags:\n<tool_call>\n<function=example_function_name>": "",
    "{{ message.content }}": "",
    "None": "",
}


def hermes(call: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def llama(call: dict[str, Any]) -> str:
    return json.dumps({"name": call["name"], "parameters": call["arguments"]})


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", hermes(ADD), ("", [ADD])),
        ("hermes", f"I add.\n{hermes(ADD)}\n{hermes(GET)}\n", ("I add.", [ADD, GET])),
        ("hermes", hermes({**ADD, "id": 7}), ("", [ADD])),
        ("llama-json", llama(GET), ("", [GET])),
        ("llama-json", f" {llama(GET)}; {llama(GET)}\n", ("", [GET, GET])),
    ],
)
def test_calls_are_read_with_the_text_before_them(form: str, text: str, expected: Any) -> None:
    read = FORMATS[form].read(text)
    assert read is not None
    before, calls = read
    assert (before, [{**call, "arguments": json.loads(call["arguments"])} for call in calls]) == expected


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "5"),
        ("hermes", ""),
        ("hermes", hermes(ADD).removesuffix("</tool_call>")),
        ("hermes", hermes(ADD).replace("<tool_call>", "")),
        ("hermes", hermes(ADD) + " done"),
        ("hermes", hermes(ADD) + "<tool_call>{</tool_call>"),
        ("hermes", hermes(ADD).replace("}", "")),
        ("hermes", hermes({"name": "add", "arguments": "2"})),
        ("hermes", hermes({"name": 3, "arguments": {}})),
        ("hermes", hermes({"arguments": {}})),
        ("hermes", "<tool_call>[]</tool_call>"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>"),
        ("hermes", hermes(ADD).replace("2", r'"\ud800"')),
        ("hermes", hermes(ADD).replace("2", "NaN")),
        ("hermes", hermes(ADD).replace("2", "1e999")),
        ("llama-json", "It is " + llama(GET)),
        ("llama-json", json.dumps(GET)),
        ("llama-json", '{"answer": 5}'),
        ("llama-json", "5"),
    ],
)
def test_what_is_malformed_is_no_call(form: str, text: str) -> None:
    assert FORMATS[form].read(text) is None


def test_the_template_says_which_format_its_model_writes() -> None:
    for template, name in TAUGHT.items():
        assert format_of("auto", template) is FORMATS.get(name)
    assert format_of("llama-json", next(iter(TAUGHT))) is FORMATS["llama-json"]
    assert format_of("none", next(iter(TAUGHT))) is None
    (named,) = [get_args(hint) for field, hint in get_type_hints(EpisodesConfig).items() if field == "tool_calls"]
    assert set(named) == {"auto", "none", *FORMATS}


def test_calls_are_told_as_openai_does_and_known_again_however_they_are_written() -> None:
    read = FORMATS["hermes"].read(hermes(ADD) + hermes(GET))
    assert read is not None
    told = as_told(read[1], number=3)
    assert [call["id"] for call in told] == ["call00300", "call00301"]
    assert all(call["type"] == "function" for call in told)
    assert [call["function"]["name"] for call in told] == ["add", "get"]
    assert json.loads(told[0]["function"]["arguments"]) == ADD["arguments"]
    again = [
        {"index": 0, "id": call["id"], "function": {"name": name, "arguments": json.dumps(arguments, indent=1)}}
        for call, (name, arguments) in zip(told, [("add", ADD["arguments"]), ("get", {})], strict=True)
    ]
    assert meant(again) == meant(told)
    again[1]["function"] = {"name": "get", "arguments": {}}  # not as text
    assert meant(again) == meant(told)
    assert meant(told[:1]) != meant(told)
    assert meant([{**told[0], "function": {"name": "add", "arguments": "{"}}]) != meant(told[:1])
    assert meant(None) is None and meant([7]) == [7]
