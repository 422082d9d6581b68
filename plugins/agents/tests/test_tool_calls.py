"""Calls as models of each family write them, and as their chat templates teach them."""
# ruff: noqa: RUF001  DeepSeek's tokens have such characters

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from corerl.errors import ConfigError
from corerl_agents.answers import before
from corerl_agents.script import byte_tokenizer
from corerl_agents.tool_calls import (
    FORMATS,
    Answered,
    Shipped,
    UserFormat,
    as_sent,
    format_of,
    kinds_of_arguments,
    normalized,
    typed,
)

ADD = {"name": "add", "arguments": {"a": 2, "b": [3, "x; {"]}}
GET = {"name": "get", "arguments": {}}
TAKEN = {"add": {"a": {"type": "integer"}, "b": {"type": "array"}, "c": {"type": "string"}}, "get": {}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in TAKEN.items()
]
# As Qwen 2.5 and 3, Hermes 3, Llama 3.1, Qwen3-Coder, GLM 4.5, DeepSeek V3.1 and R1, Kimi K2, gpt-oss, MiniMax M2 and
# Mistral have them, the first as Jinja writes a string.
TAUGHT = {
    r"XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>": "hermes",
    "tags:\n<tool_call>\n{'name'...}<tool_call>\n{\"name\": <function-name>": "hermes",
    'in the format {"name": function name, "parameters": dictionary of argument name and its value}.': "llama-json",
    r"XML tags:\n<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>": "qwen-xml",
    r"<seed:tool_call>\n<function=example_function_name>": "qwen-xml",
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>": "glm",
    "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'": "deepseek",
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="$FUNCTION_NAME">': "deepseek-dsml",
    "<|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>": "kimi",
    '{{- "<|start|>assistant to=functions." ~ tool_call.name ~ "<|channel|>commentary " }}': "gpt-oss",
    '{{- "<|start|>assistant to=" }}{{- "functions." + tool_call.name }} ... {{- "<|start|>functions." +': "gpt-oss",
    r'<minimax:tool_call>\n<invoke name="tool-name-1">': "minimax",
    "{{- '[TOOL_CALLS]' + tool.function.name + '[ARGS]' }}": "mistral",
    "{{ message.content }}": "",
    "None": "",
}


def hermes(call: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def llama(call: dict[str, Any]) -> str:
    return json.dumps({"name": call["name"], "parameters": call["arguments"]})


def tagged(call: dict[str, Any], begin: str, argument: str, end: str) -> str:
    """A call with its arguments in tags, strings as they are and other values as JSON."""
    values = {key: each if isinstance(each, str) else json.dumps(each) for key, each in call["arguments"].items()}
    written = "".join(argument.format(key=key, value=value) for key, value in values.items())
    return begin.format(name=call["name"]) + written + end


def xml(call: dict[str, Any], tag: str = "tool_call") -> str:
    parameter = "<parameter={key}>\n{value}\n</parameter>\n"
    return tagged(call, f"<{tag}>\n<function={{name}}>\n", parameter, f"</function>\n</{tag}>")


def bare(call: dict[str, Any]) -> str:
    """As Qwen3-Coder writes a call now and then."""
    return xml(call).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")


def glm(call: dict[str, Any]) -> str:
    argument = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
    return tagged(call, "<tool_call>{name}\n", argument, "</tool_call>")


def invoked(call: dict[str, Any], tag: str = "") -> str:
    parameter = f'<{tag}parameter name="{{key}}">{{value}}</{tag}parameter>\n'
    return tagged(call, f'<{tag}invoke name="{{name}}">\n', parameter, f"</{tag}invoke>\n")


def minimax(*calls: dict[str, Any]) -> str:
    return f"<minimax:tool_call>\n{''.join(map(invoked, calls))}</minimax:tool_call>"


def dsml(*calls: dict[str, Any]) -> str:
    written = "".join(invoked(call, "｜DSML｜") for call in calls)
    return f"<｜DSML｜function_calls>\n{written}</｜DSML｜function_calls>"


def deepseek(*calls: dict[str, Any]) -> str:
    written = [f"{call['name']}<｜tool▁sep｜>{json.dumps(call['arguments'])}" for call in calls]
    each = "".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in written)
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


def deepseek_r1(*calls: dict[str, Any]) -> str:
    written = [f"{call['name']}\n```json\n{json.dumps(call['arguments'])}\n```" for call in calls]
    each = [f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call}<｜tool▁call▁end｜>" for call in written]
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def kimi(*calls: dict[str, Any]) -> str:
    written = [
        f"<|tool_call_begin|>functions.{call['name']}:{index}<|tool_call_argument_begin|>"
        f"{json.dumps(call['arguments'])}<|tool_call_end|>"
        for index, call in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def harmony(call: dict[str, Any], *, before: str = "<|start|>assistant") -> str:
    to = f"to=functions.{call['name']} <|constrain|>json<|message|>"
    return f"{before}<|channel|>commentary {to}{json.dumps(call['arguments'])}"


def recipient_first(call: dict[str, Any]) -> str:
    return f" to=functions.{call['name']}<|channel|>commentary json<|message|>{json.dumps(call['arguments'])}<|call|>"


def mistral(*calls: dict[str, Any]) -> str:
    return "".join(f"[TOOL_CALLS]{call['name']}[ARGS]{json.dumps(call['arguments'])}" for call in calls)


def read(form: str, text: str, opened: str = "") -> tuple[str, list[dict[str, Any]]]:
    found = FORMATS[form].read(text, TOOLS, opened=opened)
    return found.content, [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in found.calls]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", hermes(ADD), "", [ADD]),
        ("hermes", f"I add.\n{hermes(ADD)}\n{hermes(GET)}\n", "I add.", [ADD, GET]),
        ("hermes", hermes({**ADD, "id": 7}), "", [ADD]),
        ("hermes", f"{hermes(ADD)}\nand\n{hermes(GET)} now", "and\nnow", [ADD, GET]),
        ("llama-json", llama(GET), "", [GET]),
        ("llama-json", f"<|python_tag|>{llama(ADD)}", "", [ADD]),
        ("llama-json", f" {llama(GET)}; {llama(GET)}\n", "", [GET, GET]),
        ("qwen-xml", f"I add.\n\n{xml(ADD)}\n{xml(GET)}", "I add.", [ADD, GET]),
        ("qwen-xml", xml(ADD, "seed:tool_call"), "", [ADD]),
        ("qwen-xml", f"I add.\n{bare(ADD)}\n{bare(GET)}", "I add.", [ADD, GET]),
        ("qwen-xml", f"I add.\n{bare(ADD)}\n</tool_call>", "I add.", [ADD]),
        ("qwen-xml", f"<tool_call>\n{bare(ADD)}\n{bare(GET)}\n</tool_call>", "", [ADD, GET]),
        ("glm", f"\n{glm(ADD)}\n{glm(GET)}", "", [ADD, GET]),
        ("glm", f"\n{glm(GET)}".replace("\n", ""), "", [GET]),
        ("minimax", f"I add.\n{minimax(ADD, GET)}\n", "I add.", [ADD, GET]),
        ("deepseek-dsml", f"I add.\n\n{dsml(ADD, GET)}", "I add.", [ADD, GET]),
        ("deepseek", f"I add.{deepseek(ADD, GET)}", "I add.", [ADD, GET]),
        ("deepseek", deepseek_r1(ADD, GET), "", [ADD, GET]),
        ("kimi", f"I add.{kimi(ADD, GET)}", "I add.", [ADD, GET]),
        ("gpt-oss", harmony(ADD, before=""), "", [ADD]),
        ("gpt-oss", recipient_first(ADD), "", [ADD]),
        ("gpt-oss", harmony(ADD).replace("<|constrain|>json", "code"), "", [ADD]),
        ("mistral", f"I add.{mistral(ADD, GET)}", "I add.", [ADD, GET]),
        ("mistral", f"[TOOL_CALLS]{json.dumps([ADD, GET])}", "", [ADD, GET]),
        ("mistral", "[TOOL_CALLS]get[CALL_ID]abc123XYZ[ARGS]{}", "", [GET]),
    ],
)
def test_calls_of_each_family_are_read_with_the_text_around(form: str, text: str, content: str, calls: Any) -> None:
    assert read(form, text) == (content, calls)
    assert content.startswith(before(text, FORMATS[form].begins).strip())  # which a stream sends early


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "5"),
        ("hermes", ""),
        ("hermes", hermes(ADD).removesuffix("</tool_call>")),
        ("hermes", hermes(ADD).replace("<tool_call>", "")),
        ("hermes", hermes(ADD).replace("}", "")),
        ("hermes", hermes({"name": "add", "arguments": "2"})),
        ("hermes", hermes({"name": 3, "arguments": {}})),
        ("hermes", hermes({"arguments": {}})),
        ("hermes", "<tool_call>[]</tool_call>"),
        ("hermes", "<tool_call>{" + '"a": [' * 100_000 + "</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>"),
        ("hermes", hermes(ADD).replace("2", r'"\ud800"')),
        ("hermes", hermes(ADD).replace("2", "NaN")),
        ("hermes", hermes(ADD).replace("2", "1e999")),
        ("llama-json", "It is " + llama(GET)),
        ("llama-json", llama(GET) + " done"),
        ("llama-json", json.dumps(GET)),
        ("llama-json", '{"answer": 5}'),
        ("llama-json", "5"),
        ("qwen-xml", hermes(ADD)),
        ("qwen-xml", xml(ADD).removesuffix("</function>\n</tool_call>")),
        ("qwen-xml", bare(ADD).removesuffix("</function>")),
        ("qwen-xml", xml(ADD).replace("</parameter>", "")),
        ("glm", "<tool_call> here </tool_call is a tag, <tool_call>"),
        ("minimax", invoked(ADD)),  # outside the element around all calls
        ("kimi", kimi(ADD).replace("<|tool_call_end|>", "")),
        ("gpt-oss", "<|channel|>analysis<|message|>I write to=functions.add.<|end|>"),
        ("gpt-oss", harmony(ADD) + " and"),
        ("mistral", "[TOOL_CALLS]add[ARGS]2"),
    ],
)
def test_what_is_malformed_stays_the_text_that_it_is(form: str, text: str) -> None:
    assert FORMATS[form].read(text, TOOLS) == Answered(content=text)


THOUGHT = f"Like {hermes(GET)}?"


@pytest.mark.parametrize(
    ("text", "opened", "content", "calls"),
    [
        (f"<think>{THOUGHT}</think>\n{hermes(ADD)}", "", f"<think>{THOUGHT}</think>", [ADD]),
        (f"{THOUGHT}\n</think>\n{hermes(ADD)}", "<think>\n", f"{THOUGHT}\n</think>", [ADD]),
        # A template that opens what this table lacks, or a model that closes what nobody opened.
        (f"{THOUGHT}\n</think>\n{hermes(ADD)}", "", f"{THOUGHT}\n</think>", [ADD]),
        (f"I see. <think>{THOUGHT}</think> {hermes(ADD)}", "", f"I see. <think>{THOUGHT}</think>", [ADD]),
        (f"{hermes(ADD)} <think>{THOUGHT}", "", f"<think>{THOUGHT}", [ADD]),
        (f"[THINK]{THOUGHT}[/THINK]{hermes(ADD)}", "", f"[THINK]{THOUGHT}[/THINK]", [ADD]),
        # Nothing is behind it: the answer is the call, not a thought.
        (f"I add. {hermes(ADD)}\n</think>\n", "", "I add.\n</think>", [ADD]),
        (f"<think>{THOUGHT}", "", f"<think>{THOUGHT}", []),
        (THOUGHT, "<think>\n", THOUGHT, []),
        (f"<think>{THOUGHT}</think>It is 5.", "", f"<think>{THOUGHT}</think>It is 5.", []),
        # A tag that is only mentioned.
        (f"I look for `<think>` in it.\n{hermes(ADD)}", "", "I look for `<think>` in it.", [ADD]),
    ],
)
def test_calls_are_searched_behind_the_reasoning(text: str, opened: str, content: str, calls: Any) -> None:
    assert read("hermes", text, opened) == (content, calls)


@pytest.mark.parametrize(
    ("form", "write"),
    [("hermes", hermes), ("qwen-xml", xml), ("glm", glm), ("minimax", minimax), ("deepseek", deepseek), ("kimi", kimi)],
)
def test_tags_inside_an_argument_end_nothing(form: str, write: Any) -> None:
    for said in ("</tool_call> <tool_call>", "</think>", "</invoke> </function>", "</parameter> x", "<think>", "a\n b"):
        call = {"name": "add", "arguments": {"c": said, "a": 2}}
        assert read(form, f"I add.{write(call)}") == ("I add.", [call]), said


def test_a_malformed_call_beside_a_good_one_stays_text() -> None:
    bad = '<tool_call>{"name": "add", "arguments": </tool_call>'
    for text, content in ((f"{hermes(ADD)}\n{bad}", bad), (f"{bad}\n{hermes(ADD)}", bad)):
        assert read("hermes", text) == (content, [ADD])
    for form, write, end in (("qwen-xml", xml, "</parameter>"), ("glm", glm, "</arg_value>")):
        worse = write({"name": "get", "arguments": {"a": 2}}).replace(end, "")
        assert read(form, f"{worse}{write(ADD)}{worse}") == (f"{worse}\n{worse}", [ADD])


def test_so_many_malformed_calls_take_no_time() -> None:
    many = "<tool_call>\n<function=add>\n<parameter=a>\n" * 20_000
    assert read("qwen-xml", many) == (many, [])
    assert read("hermes", "a <think> " * 20_000) == ("a <think> " * 20_000, [])
    assert read("gpt-oss", " " * 100_000) == (" " * 100_000, [])


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("2", "integer", 2),
        ("\n2 ", "integer", 2),
        ("2.0", "integer", 2),
        ("2.5", "integer", "2.5"),
        ("2", "number", 2),
        ("2.5", "number", 2.5),
        ("NaN", "number", "NaN"),
        ("1_0", "integer", "1_0"),
        ("true", "boolean", True),
        ("False", "boolean", False),
        ("true", "integer", "true"),
        ("1", "boolean", "1"),
        ("None", "null string", None),
        ("7", "string", "7"),
        ("7", "string integer", 7),
        ("seven", "string integer", "seven"),
        ('{"x": [1]}', "object", {"x": [1]}),
        ("[1, 2]", "array", [1, 2]),
        ("[1, 2]", "object", "[1, 2]"),
        ("[1, 2", "array", "[1, 2"),
        ("2", "", "2"),
    ],
)
def test_arguments_in_tags_are_typed_by_the_schema(text: str, kinds: str, value: Any) -> None:
    found = typed(text, frozenset(kinds.split()))
    assert (found, type(found)) == (value, type(value))


def test_deepseek_says_itself_which_arguments_are_strings() -> None:
    given = {"id": ("true", "12"), "many": ("false", "[12, true]"), "a": ("true", "2")}
    parameters = "".join(
        f'<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n'
        for key, (string, value) in given.items()
    )
    text = dsml(GET).replace("</｜DSML｜invoke>", f"{parameters}</｜DSML｜invoke>")
    assert read("deepseek-dsml", text)[1] == [{"name": "get", "arguments": {"id": "12", "many": [12, True], "a": "2"}}]


def test_types_are_read_in_every_json_schema_form() -> None:
    forms: dict[str, tuple[Any, set[str]]] = {
        "plain": ({"type": "integer"}, {"integer"}),
        "several": ({"type": ["integer", "null"]}, {"integer", "null"}),
        "any": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        "nullable": ({"type": "number", "nullable": True}, {"number", "null"}),
        "enum": ({"enum": [1, 2]}, {"integer"}),
        "const": ({"const": True}, {"boolean"}),
        "ref": ({"$ref": "#/$defs/Point"}, {"object"}),
        "loop": ({"$ref": "#/$defs/Loop"}, {"array"}),
        "none": ({"description": "anything"}, set()),
        "odd": (True, set()),
    }
    properties = {name: schema for name, (schema, _) in forms.items()}
    defined = {"Point": {"type": "object"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "array"}]}}
    tool = {"name": "add", "parameters": {"type": "object", "properties": properties, "$defs": defined}}
    found = kinds_of_arguments([{"type": "function", "function": {"name": "get"}}, {"function": tool}], "add")
    assert {name: set(kinds) for name, kinds in found.items()} == {name: kinds for name, (_, kinds) in forms.items()}
    assert kinds_of_arguments([tool], "add") == found  # as Responses and some libraries write tools
    assert kinds_of_arguments([tool], "get") == {}


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant: ",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}


def test_shipped_response_templates_read_as_our_table_does() -> None:
    ours = byte_tokenizer()
    ours.response_template = RESPONSE_TEMPLATE
    reader = format_of("auto", ours)
    assert isinstance(reader, Shipped)
    text = f"I add.\n</think>\n\nSo:\n{xml(ADD)}"
    found = reader.read(text, TOOLS, opened="<think>\n", prompt="user: 2?\nassistant: <think>\n")
    theirs = parse_response(text, RESPONSE_TEMPLATE, prefix="user: 2?\nassistant: <think>\n", tools=TOOLS)
    assert (found.reasoning, found.content) == (theirs["reasoning_content"], theirs["content"]) == ("I add.", "So:")
    own = FORMATS["qwen-xml"].read(text, TOOLS, opened="<think>\n")
    assert found.calls == own.calls and json.loads(found.calls[0]["arguments"]) == ADD["arguments"]
    nothing = f"I add.\n</think>\n{xml(ADD).replace('<function', '<func')}"
    assert reader.read(nothing, TOOLS, prompt="assistant: <think>\n") == Answered(content=nothing)


def test_the_template_says_which_format_its_model_writes() -> None:
    ours = byte_tokenizer()
    for template, name in TAUGHT.items():
        ours.chat_template = template
        assert format_of("auto", ours) is FORMATS.get(name), template
    assert set(TAUGHT.values()) == {"", *FORMATS}
    assert format_of("llama-json", ours) is FORMATS["llama-json"]
    assert format_of("none", ours) is None
    with pytest.raises(ConfigError, match="unknown format 'hermés'; known: auto, none.*did you mean 'hermes'"):
        format_of("hermés", ours)


@pytest.mark.parametrize("name", ["my_calls:read", "mine"])
def test_a_format_is_a_function_named_or_installed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_calls.py").write_text(
        "def read(text, tools):\n"
        "    content, found, name = text.partition('CALL ')\n"
        "    return content, [{'name': name, 'arguments': {'of': len(tools)}}] if found else []\n"
    )
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[corerl.tool_calls]\nmine = my_calls:read\n")
    monkeypatch.syspath_prepend(tmp_path)
    reader = format_of(name, byte_tokenizer())
    assert isinstance(reader, UserFormat)
    found = reader.read("<think>CALL sub</think>I add. CALL add", TOOLS)
    assert found.content == "<think>CALL sub</think>I add."
    assert found.calls == [{"name": "add", "arguments": '{"of": 2}'}]
    assert reader.read("5", TOOLS) == Answered(content="5")
    broken = UserFormat("my_calls:read", lambda text, tools: [text])
    for malformed in ("x", '{"a": NaN}', "[2]", "5"):
        strict = UserFormat("m:f", lambda text, tools: ("", [{"name": "add", "arguments": json.loads(text)}]))
        assert strict.read(malformed, TOOLS) == Answered(content=malformed)
    with pytest.raises(TypeError, match=r"tool_calls='my_calls:read' returned \['5'\], wanted \(content, calls\)"):
        broken.read("5", TOOLS)


def test_calls_are_sent_in_openais_form_and_recognized() -> None:
    sent = as_sent(FORMATS["hermes"].read(hermes(ADD) + hermes(GET), TOOLS).calls, number=3)
    assert [call["id"] for call in sent] == ["call00300", "call00301"]
    assert all(call["type"] == "function" for call in sent)
    assert [call["function"]["name"] for call in sent] == ["add", "get"]
    assert json.loads(sent[0]["function"]["arguments"]) == ADD["arguments"]
    again = [
        {"index": 0, "id": call["id"], "function": {"name": name, "arguments": json.dumps(arguments, indent=1)}}
        for call, (name, arguments) in zip(sent, [("add", ADD["arguments"]), ("get", {})], strict=True)
    ]
    assert normalized(again) == normalized(sent)
    again[1]["function"] = {"name": "get", "arguments": {}}  # not as text
    assert normalized(again) == normalized(sent)
    assert normalized(sent[:1]) != normalized(sent)
    assert normalized([{**sent[0], "function": {"name": "add", "arguments": "{"}}]) != normalized(sent[:1])
    assert normalized(None) is None and normalized([7]) == [7]
