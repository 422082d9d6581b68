"""Read the tool calls in the policy's answers; how each model family writes them is data.

Calls are searched behind the reasoning, from left to right. JSON is read by a JSON reader, so that tags inside a string
end nothing; arguments in tags are typed by the tool's JSON schema. All else is text, a malformed call too.
"""
# ruff: noqa: RUF001  DeepSeek's tokens have such characters

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoints, entry_points
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen
from attrs.converters import optional

from corerl.config import imported
from corerl.data import parse_json
from corerl.errors import ConfigError
from corerl.messages import did_you_mean, short_repr
from corerl.rollout import OPENING, TAGS
from corerl_agents.texts import CLOSING, end_of_reasoning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]  # as requests have them
Function = Callable[[str, Tools], tuple[str, Sequence[Mapping[str, Any]]]]
REASONING = ("reasoning_content", "thinking", "reasoning")  # the names that response templates have for it
MALFORMED = 64  # calls of one answer, after which the search ends: each may scan the whole answer
DECODER = json.JSONDecoder()
BEHIND = "|".join(rf"(?<={re.escape(tag)})" for tag in TAGS.values())  # reasoning


@frozen(kw_only=True)
class Answered:
    """An answer, read."""

    content: str  # without calls; of one with calls, stripped
    # Name, and arguments as JSON; maybe the id that the policy gave it.
    calls: Sequence[Mapping[str, str]] = field(factory=list)
    reasoning: str | None = None  # if whoever reads calls knows it apart from the content


class Reader(Protocol):
    """Reads answers of one model family."""

    @property
    def begins(self) -> Sequence[str]:
        """Texts without which no call begins. With "", nothing is known of an answer before its end."""

    def read(self, text: str, tools: Tools, *, opened: str = "", prompt: str = "") -> Answered:
        """`text`: an answer with its special tokens, but without the one that ended it. `opened`: the reasoning tag
        that is open before it. `prompt`: what stands before it."""


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


# ---- formats -------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class ToolFormat:
    """How a model family writes calls. `opening` stands before the arguments, with the groups `name`, and `id` if the
    policy gives its calls one; behind them stands `closing`."""

    taught: re.Pattern[str] = field(converter=_compiled)  # is found in their chat templates
    opening: re.Pattern[str] = field(converter=_compiled)
    closing: re.Pattern[str] = field(converter=_compiled)
    # One argument, with the groups `key` and `value`, which has no beginning of another one, so that an argument that
    # does not end takes none of the next call; a group `string` says "true" or "false" in place of a schema. None: the
    # arguments are a JSON object, or where `opening` has no name, a JSON object with `name` and arguments under this
    # key, or a list of these.
    argument: re.Pattern[str] | None = field(default=None, converter=optional(_compiled))
    key: str = "arguments"
    begins: tuple[str, ...]  # texts without which no opening is found

    def read(self, text: str, tools: Tools, *, opened: str = "", prompt: str = "") -> Answered:
        outside, calls, malformed = [0], list[Mapping[str, str]](), 0  # edges of the text outside calls
        marks = _compiled(f"(?P<reasoning>{OPENING.pattern})|(?P<end>{CLOSING.pattern})|(?:{self.opening.pattern})")
        at = end_of_reasoning(text, opened)
        while malformed < MALFORMED and (found := marks.search(text, at)) is not None:
            at = found.end()
            if found["reasoning"]:
                close, line = TAGS[found["reasoning"]], text[outside[-1] : found.start()].rpartition("\n")[2]
                if (end := text.find(close, at)) >= 0:
                    at = end + len(close)
                elif line.strip():  # an opening tag without a closing one is only mentioned there
                    malformed += 1
                else:
                    at = len(text)
            elif found["end"]:
                if text[at:].strip():  # it ends reasoning that nobody opened: what seemed a call was a thought
                    outside, calls = [0], []
            else:
                try:
                    some, end = self._calls(text, found, tools)
                except (ValueError, RecursionError):  # nested more deeply than can be written again
                    malformed += 1
                    continue
                calls += some
                outside += [found.start(), end]
                at = end
        pieces = [text[a:b].strip() for a, b in zip(outside[::2], [*outside[1::2], len(text)], strict=True)]
        return Answered(content="\n".join(filter(None, pieces)) if calls else text, calls=calls)

    def _calls(self, text: str, opening: re.Match[str], tools: Tools) -> tuple[list[Mapping[str, str]], int]:
        """The calls behind this opening, and where they end. Raises ValueError for a malformed one."""
        groups, at = opening.groupdict(), opening.end()
        name, found = groups.get("name"), list[tuple[Any, Any]]()
        if self.argument is not None:
            kinds, given = kinds_of_arguments(tools, name or ""), dict[str, Any]()
            while (one := self.argument.match(text, at)) is not None:
                allowed = STRING.get(one.groupdict().get("string") or "", kinds.get(one["key"], frozenset()))
                given[one["key"]] = typed(one["value"], allowed)
                at = one.end()
            found = [(name, given)]
        else:
            value, at = DECODER.raw_decode(text, at)
            each = value if isinstance(value, list) and not name else [value]
            found = [(name, value)] if name else [_named(one, self.key) for one in each]
        if (closing := self.closing.match(text, at)) is None:
            raise ValueError("a call does not end")
        own = {"id": groups["id"]} if groups.get("id") else {}
        return [{**_call(*each), **own} for each in found], closing.end()


def _named(value: Any, key: str) -> tuple[Any, Any]:
    return (value.get("name"), value.get(key)) if isinstance(value, dict) else (None, None)


def _call(name: Any, arguments: Any) -> dict[str, str]:
    """A call with its arguments as JSON. Raises ValueError if it is no call, or cannot be written as JSON."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call has a name and arguments")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()  # which half a surrogate pair does not let
    return {"name": name, "arguments": written}


def _invoke(tag: str, calls: str, begins: tuple[str, ...]) -> dict[str, Any]:
    """Calls as elements `invoke` with elements `parameter`, in one element `calls`; `tag` begins all their names."""
    return {
        "begins": begins,
        "opening": rf'(?:<{tag}{calls}>|(?<=</{tag}invoke>))\s*<{tag}invoke name="(?P<name>[^"]+)">\s*',
        "argument": rf'<{tag}parameter name="(?P<key>[^"]+)"(?: string="(?P<string>true|false)")?[^>]*>'
        rf"(?P<value>(?:(?!<{tag}parameter ).)*?)"
        rf"</{tag}parameter>\s*(?=<{tag}parameter |</{tag}invoke>)",
        "closing": rf"</{tag}invoke>(?:\s*</{tag}{calls}>)?",
    }


# In the order in which `auto` tries them: what a template may have besides its model's own format comes last.
FORMATS: Mapping[str, ToolFormat] = {
    "qwen-xml": ToolFormat(  # Qwen3-Coder, Qwen 3.5, Seed-OSS
        taught=r"<(?:seed:)?tool_call>(?:\\n|\s)*<function=",
        begins=("<tool_call>", "<seed:tool_call>", "<function="),
        # Qwen3-Coder leaves out the element around a call now and then.
        opening=r"(?:<(?:seed:)?tool_call>\s*)?<function=(?P<name>[^>\s]+)>\s*",
        argument=r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>\s*"
        r"(?=<parameter=|</function>)",
        closing=r"</function>(?:\s*</(?:seed:)?tool_call>)?",
    ),
    "glm": ToolFormat(  # GLM 4.5 to 5
        taught=r"<arg_key>",
        begins=("<tool_call>",),
        opening=r"<tool_call>\s*(?P<name>[^\s<{]+)\s*",
        argument=r"<arg_key>\s*(?P<key>[^<]+?)\s*</arg_key>\s*<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>\s*"
        r"(?=<arg_key>|</tool_call>)",
        closing=r"</tool_call>",
    ),
    # MiniMax M2
    "minimax": ToolFormat(taught=r"<minimax:tool_call>", **_invoke("", "minimax:tool_call", ("<minimax:tool_call>",))),
    "deepseek-dsml": ToolFormat(  # DeepSeek V3.2 and later
        taught="｜DSML｜",
        **_invoke("｜DSML｜", "(?:function|tool)_calls", ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")),
    ),
    "deepseek": ToolFormat(  # DeepSeek R1, V3 and V3.1
        taught=r"<｜tool▁call▁begin｜>",
        begins=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        # R1 and V3 write a type before the name, and the arguments as a block of code.
        opening=r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?=[^\n<]+\n```))?"
        r"(?P<name>[^\n<]+)(?:<｜tool▁sep｜>|\n```json)\s*",
        closing=r"\s*(?:```\s*)?<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
    ),
    "kimi": ToolFormat(  # Kimi K2
        taught=r"<\|tool_call_begin\|>",
        begins=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        opening=r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
        r"(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*",
        closing=r"\s*<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
    ),
    "gpt-oss": ToolFormat(  # gpt-oss
        taught=r"to=functions\.|<\|start\|>functions\.",
        begins=("<|start|>", "<|channel|>", "to=functions."),
        opening=r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? ?\bto=functions\.(?P<name>[\w.-]+)\s*"
        r"(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\s*(?:json|code)?\s*<\|message\|>\s*",
        closing=r"\s*(?:<\|call\|>|\Z)",
    ),
    "mistral": ToolFormat(  # Mistral, Magistral, Devstral
        taught=r"\[TOOL_CALLS\]",
        begins=("[TOOL_CALLS]",),
        opening=r"\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*)?(?=[\[{])",
        closing=r"",
    ),
    "hermes": ToolFormat(  # Qwen 2.5, Qwen 3, Hermes 2 Pro and 3
        taught=r'<tool_call>(?:\\n|\s)*\{\\?"name',
        begins=("<tool_call>",),
        opening=r"<tool_call>\s*(?=\{)",
        closing=r"\s*</tool_call>",
    ),
    "llama-json": ToolFormat(  # Llama 3.1 to 3.3
        taught=r'"parameters\\?": dictionary of argument name',
        begins=("{", "<|python_tag|>"),
        # An answer behind its reasoning is either text or calls.
        opening=rf"(?:\A|{BEHIND}|(?<=\}})\s*;)\s*(?:<\|python_tag\|>\s*)?(?=\{{)",
        closing=r"(?=\s*(?:;|\Z))",
        key="parameters",
    ),
}


@frozen
class UserFormat:
    """A user's function `(text, tools) -> (content, calls)`: of an answer behind its reasoning and of a request's
    tools, the text without calls, and the calls, each a name and arguments, an object. A ValueError leaves the answer
    as it is."""

    name: str
    function: Function
    begins = ("",)

    def read(self, text: str, tools: Tools, *, opened: str = "", prompt: str = "") -> Answered:
        end = end_of_reasoning(text, opened)
        try:
            found = self.function(text[end:], tools)
            if not _is_read(found):
                raise TypeError(
                    f"tool_calls={self.name!r} returned {short_repr(found)}, wanted (content, "
                    "calls), each call an object with 'name' and 'arguments', an object"
                )
            content, calls = found
            made = [_call(call["name"], call["arguments"]) for call in calls]
        except (ValueError, RecursionError):  # as json.loads raises for a malformed call
            return Answered(content=text)
        return Answered(content=(text[:end] + content).strip() if made else text, calls=made)


def _is_read(found: Any) -> bool:
    if not isinstance(found, tuple | list) or len(found) != 2 or not isinstance(found[0], str):
        return False
    return all(isinstance(call, Mapping) and {"name", "arguments"} <= call.keys() for call in found[1])


@frozen
class Shipped:
    """The response template that a tokenizer ships, read by transformers."""

    tokenizer: PreTrainedTokenizerBase
    begins = ("",)

    def read(self, text: str, tools: Tools, *, opened: str = "", prompt: str = "") -> Answered:
        try:
            parsed = self.tokenizer.parse_response(text, prefix=prompt, tools=[dict(tool) for tool in tools])
            functions = [call["function"] for call in parsed.get("tool_calls") or ()]
            calls = [_call(*_named(each, "arguments")) for each in functions]
        except (ValueError, KeyError, TypeError, RecursionError):  # as it raises for what does not fit its template
            return Answered(content=text)
        if not calls:
            return Answered(content=text)
        reasoning = next((parsed[name] for name in REASONING if parsed.get(name)), "")
        return Answered(content=parsed.get("content") or "", calls=calls, reasoning=reasoning)


def installed() -> EntryPoints:
    """The formats of other distributions: entry points of the group `corerl.tool_calls`, each a function as
    'module:function' names it."""
    return entry_points(group="corerl.tool_calls")


def names() -> list[str]:
    """All that `samplers.episodes.tool_calls` may be, besides 'module:function'."""
    return ["auto", "none", *FORMATS, *installed().names]


def format_of(name: str, tokenizer: PreTrainedTokenizerBase | None) -> Reader | None:
    """The format that `samplers.episodes.tool_calls` names; None for "none", and for "auto" if none fits the tokenizer.
    Raises ConfigError for an unknown name."""
    if name == "none":
        return None
    if name == "auto":
        if getattr(tokenizer, "response_template", None) is not None:
            return Shipped(tokenizer)  # type: ignore[arg-type]  # it has an attribute
        taught = name_of_taught(tokenizer.chat_template if tokenizer is not None else None)
        return format_of(taught, tokenizer) if taught else None
    if name in FORMATS:
        return FORMATS[name]
    where = installed()[name].value if name in installed().names else name
    if ":" in where:
        return UserFormat(name, imported(where, setting="samplers.episodes.tool_calls"))
    known = names()
    raise ConfigError(
        f"samplers.episodes.tool_calls: unknown format {name!r}; known: {', '.join(known)}, or 'module:function'"
        + did_you_mean(name, known)
    )


def name_of_taught(chat_template: Any) -> str:
    """The format that a chat template teaches, or writes earlier calls in; "" if that is unknown."""
    return next((name for name, each in FORMATS.items() if re.search(each.taught, str(chat_template))), "")


def unread(name: str, calls: Reader | None, tokenizer: PreTrainedTokenizerBase, *, section: str) -> str:
    """One line about the calls that are not read in this format; "" if they are, or are not meant to be."""
    taught = name_of_taught(tokenizer.chat_template)
    if name == "auto" and calls is None:
        return (
            "tools of a request: the chat template teaches no format of tool calls that is known, so calls stay text; "
            f"set {section}.tool_calls to one of {', '.join(names()[1:])}, or to 'module:function'"
        )
    if name in FORMATS and taught not in ("", name):
        return (
            f"{section}.tool_calls={name!r}: the chat template teaches {taught!r}, so calls that are written "
            "so stay text; set it to 'auto'"
        )
    return ""


# ---- arguments -----------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[type, ...]] = {  # a bool is no int here
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}
STRING = {"true": frozenset({"string"}), "false": frozenset(KINDS)}  # what DeepSeek's attribute `string` allows
PYTHONS = {"True": "true", "False": "false", "None": "null"}


def typed(text: str, kinds: frozenset[str]) -> Any:
    """An argument that is written as text, as the first JSON value of one of these kinds that it can be; else the
    text."""
    try:
        value = parse_json(PYTHONS.get(text.strip(), text))
        json.dumps(value, allow_nan=False)
    except ValueError:
        return text
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        return value if "number" in kinds else int(value)
    return value if any(type(value) in KINDS[kind] for kind in kinds & KINDS.keys()) else text


def kinds_of_arguments(tools: Tools, name: str) -> dict[str, frozenset[str]]:
    """The JSON types that the schema of the tool of this name lets each of its arguments have."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            root = function.get("parameters")
            properties = root.get("properties") if isinstance(root, Mapping) else None
            if isinstance(properties, Mapping):
                return {key: frozenset(_kinds(schema, root)) for key, schema in properties.items()}
    return {}


def _kinds(schema: Any, root: Any, depth: int = 8) -> Iterator[str]:
    if not isinstance(schema, Mapping) or not depth:
        return
    declared = schema.get("type")
    yield from (each for each in [declared, *_list(declared)] if isinstance(each, str))
    if schema.get("nullable"):
        yield "null"
    for value in [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
        yield next((kind for kind in KINDS if type(value) in KINDS[kind]), "string")
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        found = root
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        yield from _kinds(found, root, depth - 1)
    for choice in (each for key in ("anyOf", "oneOf", "allOf") for each in _list(schema.get(key))):
        yield from _kinds(choice, root, depth - 1)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []  # a client's schema may be anything


# ---- OpenAI's messages ---------------------------------------------------------------------------------------------


def as_sent(calls: Sequence[Mapping[str, str]], *, number: int) -> list[dict[str, Any]]:
    """Format the calls of message `number` of a conversation as OpenAI's `message.tool_calls`."""
    given = [call.get("id") for call in calls]
    return [
        {
            # Deterministic, since templates may print it; nine letters and digits, since some templates require that.
            "id": given[index] if given.count(given[index]) == 1 and given[index] else f"call{number:03d}{index:02d}",
            "type": "function",
            "function": {key: value for key, value in call.items() if key != "id"},
        }
        for index, call in enumerate(calls)
    ]


def normalized(calls: Any) -> Any:
    """The calls in a form that compares equal however a client rewrites them; unchanged if they have another shape."""
    try:
        functions = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
        return [(id_, name, parse_json(given) if isinstance(given, str) else given) for id_, name, given in functions]
    except (KeyError, TypeError, ValueError, RecursionError):
        return calls
