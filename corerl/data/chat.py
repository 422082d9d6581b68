"""Read messages and tools of chats from rows, and show them as text; rollout/encoding.py applies chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from corerl.data import media
from corerl.messages import short_repr

# Where half a surrogate pair may be: escaped, or raw, which `json.loads` lets pass.
HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
SHOWN = 60  # characters of a value that a message shows
MARK = "<picture>"
Messages = tuple[Mapping[str, Any], ...]


def parse_json(text: str | bytes) -> Any:
    """`json.loads` for what data, clients and policies write: whatever is wrong is a ValueError, also brackets without
    end, and half a surrogate pair, which no tokenizer takes."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        value = json.loads(text)
        if HALF_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested more deeply than can be read") from None
    except UnicodeEncodeError:
        raise ValueError("a text in it has half a surrogate pair, which is no character") from None
    return value


def read_messages(value: Sequence[Any], *, pictures: bool = False) -> Messages:
    """The messages in a row's field, as `read_message`. Raises ValueError naming the first one that cannot be used."""
    messages = []
    for number, message in enumerate(value, start=1):
        try:
            messages.append(read_message(message, pictures=pictures))
        except ValueError as error:
            raise ValueError(f"message {number} {error}") from error
    last = messages[-1]
    if last["role"] == "assistant" and last.get("tool_calls"):
        raise ValueError(
            f"message {len(messages)}, the last one, is a tool call of the assistant, which leaves nothing to answer; "
            "add the tool's result, or remove the call"
        )
    return tuple(messages)


def read_message(message: Any, *, pictures: bool = False) -> dict[str, Any]:
    """A message in OpenAI's format as chat templates expect it: without null fields, content as one text ("" beside
    tool calls; what refuses in words is content), the arguments of tool calls as objects, and calls and results of
    functions in their older form as those of tools. With `pictures` content may have parts `{"type": "image"}`, with
    the picture's `id` or without, and is a list of parts if it has some. Raises ValueError that says what it is
    instead."""
    known = {key: held for key, held in message.items() if held is not None} if isinstance(message, Mapping) else {}
    if not isinstance(known.get("role"), str):
        raise ValueError("has no string 'role'; every message needs a role, a string, and content")
    for name, value in known.items():
        if name != "content" and (kind := media.kind_in_field(name, value)):
            way = media.way() if kind == media.IMAGES and not pictures else ""
            raise ValueError(f"has {kind} in its field {name!r}, but the model reads only text; remove it{way}")
    calls = known.pop("tool_calls", None) or []  # some templates take an empty list for a call
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(
            f"has the tool_calls {short_repr(calls, SHOWN)}, wanted a list of objects as in OpenAI's format"
        )
    if isinstance(known.get("function_call"), Mapping) and not calls:
        calls = [{"type": "function", "function": known.pop("function_call")}]
    if known["role"] == "function":
        known["role"] = "tool"
    if calls:
        known["tool_calls"] = [_read_call(call) for call in calls]
    if not known.get("content") and isinstance(known.get("refusal"), str):
        known["content"] = known.pop("refusal")
    content = known.get("content", "" if calls else None)
    if isinstance(content, list | tuple):
        content = _read_parts(content, pictures=pictures)
    if not isinstance(content, str | list):
        raise ValueError(
            "has no string 'content'; every message needs a content, a string or a list of text parts, unless it has "
            "tool_calls"
        )
    return {**known, "content": content}


def _read_parts(parts: Sequence[Any], *, pictures: bool) -> str | list[Mapping[str, str]]:
    """One text; around pictures, texts as parts."""
    found: list[Mapping[str, str]] = []
    for part in parts:
        if pictures and _is_image(part):
            found.append(part)
        elif _is_text(part):
            found.append({"type": "text", "text": part[part.get("type", "text")]})
        else:
            way = media.way() if not pictures and media.kind_in_messages([{"content": [part]}]) == media.IMAGES else ""
            raise ValueError(
                f"has the content part {short_repr(part, SHOWN)}, but the model reads only text parts, which have "
                f"a string 'text'; remove it{way}"
            )
    return found if any(map(_is_image, found)) else "".join(part["text"] for part in found)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image" and part.keys() <= {"type", "id"}


def _is_text(part: Any) -> bool:
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    return kind in ("text", "refusal") and isinstance(part.get(kind), str)


def _read_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenAI writes arguments as JSON text; a template would show that as a string in JSON."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = parse_json(function["arguments"])
    except ValueError:  # a policy's malformed call stays as it was written
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def read_tools(value: Any) -> Messages:
    """The tools in a row's field: a list of objects, each of them or the whole list also as JSON text. Raises
    ValueError."""
    tools = (parsed(value) if value else None) or []  # JSON text may say null
    read = [parsed(tool) for tool in tools] if isinstance(tools, list | tuple) else [tools]
    if not all(isinstance(tool, Mapping) for tool in read):
        raise ValueError(
            f"got {short_repr(value, SHOWN)}, wanted a list of tools, each an object as in OpenAI's `tools`; set "
            "data.tools_key to the field that holds the tools, or to '' if none does"
        )
    return tuple(read)


def parsed(value: Any) -> Any:
    """The value of JSON text; anything else as it is."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def without_nulls(value: Any) -> Any:
    """`value` without the null fields of its objects. A column of structs has the fields of all rows' objects, null
    where a row lacks them: as other arguments of tool calls, or other properties of schemas."""
    if isinstance(value, Mapping):
        return {key: without_nulls(held) for key, held in value.items() if held is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(each) for each in value]
    return value


def text_of(content: str | Sequence[Mapping[str, str]]) -> str:
    """The text of a message's content, with MARK for each picture."""
    return content if isinstance(content, str) else "".join(part.get("text", MARK) for part in content)


def readable(messages: Messages) -> str:
    """The content of a single message; several messages as lines `role: content`, each tool call behind its message's
    content, `name({"a": 2})`; "" of none. Pictures are MARK."""
    if len(messages) == 1:
        return text_of(messages[0]["content"])
    return "\n".join(f"{message['role']}: {' '.join(_said(message))}" for message in messages)


def _said(message: Mapping[str, Any]) -> Iterator[str]:
    calls = message.get("tool_calls") or ()
    if message["content"] or not calls:
        yield text_of(message["content"])
    for call in calls:
        function = call.get("function", call)
        arguments = function.get("arguments", "") if isinstance(function, Mapping) else ""
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
        yield f"{function.get('name', '?') if isinstance(function, Mapping) else '?'}({written})"
