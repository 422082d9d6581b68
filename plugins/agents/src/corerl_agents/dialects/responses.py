"""OpenAI's Responses: items become the messages of a conversation, and an answer becomes items."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from corerl.messages import short_repr
from corerl_agents.chat_requests import ChatAnswer, ChatRequest, Piece
from corerl_agents.dialects.base import (
    LIMIT,
    MODEL,
    NOT_CONSTRAINED,
    OTHER_TOOLS,
    THINKS,
    Dialect,
    Sent,
    event,
    openai_error,
)
from corerl_agents.dialects.chat import logprobs_of
from corerl_agents.fields import (
    COUNT,
    NOBODYS,
    OBJECT,
    OBJECTS,
    SWITCH,
    TEXT,
    Field,
    Values,
    checked,
    honoured,
    ignored,
    is_list,
    never,
    only,
    read_object,
)
from corerl_agents.refused import SHOWN, Refused

OPENAIS = "it is a service of OpenAI's; leave it out"
KEPT = "the server keeps no answers; send all items in `input`"
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")

FIELDS: Mapping[str, Field] = {
    "input": honoured(
        Values(
            wanted="a string or a list of items",
            fits=lambda value: isinstance(value, str) or is_list(value, dict),
            taken=("hello", [{"role": "user", "content": "hello"}]),
            refused=(3, ["hello"]),
        ),
        "messages with text and pictures, `function_call`, `function_call_output`, `reasoning`; others are refused. "
        "The role `developer` is shown as `system`. Calls and reasoning belong to the assistant's message next to them",
    ),
    "instructions": honoured(TEXT, "a first message of the role `system`"),
    "max_output_tokens": honoured(COUNT, LIMIT),
    "tools": honoured(
        OBJECTS,
        f"{OTHER_TOOLS}. Tools that OpenAI runs are refused by their `type`; `strict` is ignored",
        taken=([TOOL],),
    ),
    "tool_choice": only(
        "auto",
        "none",
        refused=("required", {"type": "function", "name": "add"}),
        becomes="honoured",
        why=f"as in Chat Completions. A call cannot be required: {NOT_CONSTRAINED}",
    ),
    "parallel_tool_calls": honoured(SWITCH, "with `false`, only the first call of an answer is returned"),
    "include": honoured(
        Values(
            wanted=f"a list of {' and '.join(map(repr, INCLUDED))}",
            fits=lambda value: is_list(value, str) and set(value) <= set(INCLUDED),
            taken=([LOGPROBS], ["reasoning.encrypted_content"]),
            refused=(["file_search_call.results"],),
        ),
        "the log-probs of the sampled tokens; reasoning is never encrypted",
    ),
    "stream": honoured(SWITCH, "[events while the answer is sampled](../agents.md#streams)"),
    "stream_options": ignored(
        OBJECT, "nothing is obfuscated", taken=({"include_obfuscation": False},), refused=(True,)
    ),
    "model": ignored(TEXT, NOBODYS),
    "user": ignored(TEXT, NOBODYS),
    "metadata": ignored(OBJECT, NOBODYS),
    "safety_identifier": ignored(TEXT, NOBODYS),
    "prompt_cache_key": ignored(TEXT, NOBODYS),
    "prompt_cache_options": ignored(OBJECT, "engines keep what they have read"),
    "prompt_cache_retention": ignored(TEXT, "engines keep what they have read"),
    "service_tier": ignored(TEXT, NOBODYS),
    "store": ignored(SWITCH, KEPT),
    "reasoning": ignored(
        OBJECT,
        f'{THINKS}. With `reasoning = "separate"` an answer\'s reasoning is its first item',
        taken=({"effort": "low"},),
    ),
    "top_logprobs": only(0, refused=(5,), why="no other tokens'"),
    "truncation": only("disabled", refused=("auto",), why="messages are those that were sent"),
    "background": only(False, refused=(True, 0), why=KEPT),
    "text": ignored(
        Values(
            wanted="{'format': {'type': 'text'}}; leave it out",
            fits=lambda value: (
                isinstance(value, dict)
                and value.keys() <= {"format", "verbosity"}
                and value.get("format") in (None, {"type": "text"})
            ),
            taken=({"format": {"type": "text"}}, {"verbosity": "low"}),
            refused=({"format": {"type": "json_object"}}, {"format": {"type": "json_schema"}}),
        ),
        f"how much the policy says is its own matter. Another format is refused: {NOT_CONSTRAINED}",
    ),
    "previous_response_id": never(KEPT, refused=("resp_1",)),
    "conversation": never(KEPT, refused=("conv_1",)),
    "prompt": never(OPENAIS, refused=({"id": "pmpt_1"},)),
    "background_options": never(OPENAIS, refused=({},)),
    "context_management": never("shorten the input yourself", refused=([],)),
    "max_tool_calls": never("no tools are run here; leave it out", refused=(1,)),
    "moderation": never(OPENAIS, refused=({},)),
    "access_programs": never(OPENAIS, refused=([],)),
    "image": never("only text is sampled; leave it out", refused=({},)),
}


def read_request(body: str | bytes, sampling: Mapping[str, float]) -> ChatRequest:
    """`sampling`: the run's values of temperature, top_p and top_k, which requests may repeat. Raises Refused."""
    wanted = "input: missing; send a string or a list of items"
    asked = read_object(body, wanted)
    given = checked(asked, FIELDS, sampling)
    if "input" not in given:
        raise Refused(wanted)
    items = given["input"]
    messages = [{"role": "user", "content": items}] if isinstance(items, str) else _messages(items)
    if "instructions" in given:
        messages.insert(0, {"role": "system", "content": given["instructions"]})
    most_calls = None if given.get("parallel_tool_calls", True) else 1
    return ChatRequest(
        messages=messages,
        tools=[_tool(number, tool) for number, tool in enumerate(given.get("tools", ()))],
        most_calls=0 if given.get("tool_choice") == "none" else most_calls,
        max_tokens=given.get("max_output_tokens"),
        logprobs=LOGPROBS in given.get("include", ()),
        stream=given.get("stream", False),
    )


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    where = f"tools[{number}]"
    if tool.get("type") != "function":
        raise Refused(f"{where}.type: got {short_repr(tool.get('type'), SHOWN)}, wanted 'function': {OPENAIS}")
    if unknown := sorted(tool.keys() - {"type", "name", "description", "parameters", "strict"}):
        raise Refused(f"{where}.{unknown[0]}: got {short_repr(tool[unknown[0]], SHOWN)}, wanted no such field")
    if not isinstance(tool.get("name"), str):
        raise Refused(f"{where}.name: got {short_repr(tool.get('name'), SHOWN)}, wanted a string")
    shown = ("name", "description", "parameters")
    return {"type": "function", "function": {key: tool[key] for key in shown if tool.get(key) is not None}}


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a conversation that these items are: an answer may be several items."""
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}  # the last message, while it is one of the assistant

    def said(*, begins: bool) -> dict[str, Any]:
        """The answer that an item belongs to: another one, if it `begins` what this one already has."""
        nonlocal answer
        if not answer or begins:
            answer = {"role": "assistant", "content": ""}
            messages.append(answer)
        return answer

    for number, item in enumerate(items):
        where, kind = f"input[{number}]", item.get("type", "message")
        has = bool(answer.get("content") or answer.get("tool_calls"))
        if kind == "reasoning":
            said(begins=has)["reasoning_content"] = _joined(item.get("content"))
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            said(begins=False).setdefault("tool_calls", []).append(call)
        elif kind == "message" and item.get("role") == "assistant":
            said(begins=has)["content"] = _content(f"{where}.content", item.get("content"), said=True)
        elif kind in ("message", "function_call_output"):
            answer = {}
            output = kind == "function_call_output"
            name = "output" if output else "content"
            content = _content(f"{where}.{name}", item.get(name))
            role = "system" if item.get("role") == "developer" else item.get("role")
            own = {"role": "tool", "tool_call_id": item.get("call_id")} if output else {"role": role}
            messages.append({**own, "content": content})
        else:
            raise Refused(
                f"{where}.type: got {short_repr(kind, SHOWN)}, wanted 'message', 'function_call', "
                "'function_call_output' or 'reasoning'"
            )
    return messages


def _joined(parts: Any) -> str:
    """The text of parts; reasoning that was encrypted elsewhere has none."""
    return "".join(str(part.get("text") or "") for part in parts or () if isinstance(part, Mapping))


def _content(where: str, content: Any, *, said: bool = False) -> Any:
    """Text and pictures as parts of a message; what was `said` as text."""
    if not isinstance(content, list):
        return content  # a text, or what is refused where messages are read
    parts = [_part(f"{where}[{number}]", part) for number, part in enumerate(content)]
    return _joined(parts) if said else parts


def _part(where: str, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": part.get("text")}
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    raise Refused(f"{where}: got {short_repr(part, SHOWN)}, wanted a part of the type 'input_text' or 'input_image'")


def response(answer: ChatAnswer, request: ChatRequest, number: int) -> dict[str, Any]:
    """Format the answer as OpenAI's `Response`."""
    cut = answer.finish_reason == "length"
    return {
        **_head(request, number),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(_items(answer, number)),
        "usage": {
            "input_tokens": len(answer.prompt_token_ids),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(answer.token_ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(answer.prompt_token_ids) + len(answer.token_ids),
        },
    }


def _head(request: ChatRequest, number: int) -> dict[str, Any]:
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": MODEL,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": request.most_calls != 1,
        "temperature": None,
        "tool_choice": "none" if request.most_calls == 0 else "auto",
        "tools": [
            {"type": "function", "parameters": None, "strict": False, **each["function"]} for each in request.tools
        ],
        "top_p": None,
        "usage": None,
    }


def _items(answer: ChatAnswer, number: int) -> Iterator[dict[str, Any]]:
    if answer.reasoning:
        yield _reasoning(number, [{"type": "reasoning_text", "text": answer.reasoning}])
    if answer.text or not (answer.reasoning or answer.tool_calls):
        yield _said(number, [_text(answer.text, logprobs_of(answer))], cut=answer.finish_reason == "length")
    for index, call in enumerate(answer.tool_calls):
        function = call["function"]
        yield {
            "id": f"fc_{number}_{index}",
            "type": "function_call",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": function["arguments"],
            "status": "completed",
        }


def _reasoning(number: int, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": list(content)}


def _said(number: int, content: Sequence[Mapping[str, Any]], *, cut: bool) -> dict[str, Any]:
    status = "incomplete" if cut else "completed" if content else "in_progress"
    return {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": status, "content": list(content)}


def _text(text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


CREATED = "response.created"
PARTS = {"reasoning": "reasoning_text", "message": "output_text"}  # what each item's text is


class Events:
    """The answer as events: of texts as they become known, then calls, and the whole response."""

    def __init__(self, request: ChatRequest, number: int) -> None:
        self._request, self._number = request, number
        self._sequence = 0  # the next event's number
        self._index = -1  # the last item's number
        self._open = ""  # the type of the item that is open
        self._sent = Sent("reasoning", "message")

    def piece(self, piece: Piece) -> bytes:
        return self._texts(piece.reasoning, piece.text)

    def end(self, answer: ChatAnswer) -> bytes:
        whole = response(answer, self._request, self._number)
        events = self._texts(answer.reasoning, answer.text)
        for item in whole["output"]:
            if item["type"] == "function_call":
                events += self._stop() + self._call(item)
            elif item["type"] == "message":
                events += b"" if self._open == "message" else self._start("message")
                events += self._stop(item)
        return events + self._stop() + self._event(f"response.{whole['status']}", response=whole)

    def _texts(self, reasoning: str, text: str) -> bytes:
        """What is new of each text, in an item of its type."""
        events = b""
        for kind, delta in self._sent.news(reasoning, text):
            if self._open != kind:
                events += self._stop() + self._start(kind)
            logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            events += self._of_text("delta", delta=delta, **logprobs)
        return events

    def _item(self, kind: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return _reasoning(self._number, parts) if kind == "reasoning" else _said(self._number, parts, cut=False)

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text} if kind == "reasoning" else _text(text)

    def _start(self, kind: str) -> bytes:
        self._open, self._index = kind, self._index + 1
        added = self._event("response.output_item.added", output_index=self._index, item=self._item(kind, []))
        return added + self._of_item("response.content_part.added", part=self._part(kind, ""))

    def _stop(self, item: Mapping[str, Any] | None = None) -> bytes:
        """Close the item that is open: with what was sent of it, or as it is in the response."""
        if not self._open:
            return b""
        kind = self._open
        item = item or self._item(kind, [self._part(kind, self._sent.texts[kind])])
        (part,) = item["content"]
        known = {"text": part["text"], **({"logprobs": part["logprobs"]} if kind == "message" else {})}
        done = self._of_text("done", **known) + self._of_item("response.content_part.done", part=part)
        self._open = ""
        return done + self._event("response.output_item.done", output_index=self._index, item=item)

    def _call(self, item: Mapping[str, Any]) -> bytes:
        self._index += 1
        begun = {**item, "arguments": "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": self._index}
        arguments = {"name": item["name"], "arguments": item["arguments"]}
        return b"".join(
            [
                self._event("response.output_item.added", output_index=self._index, item=begun),
                self._event("response.function_call_arguments.delta", **place, delta=item["arguments"]),
                self._event("response.function_call_arguments.done", **place, **arguments),
                self._event("response.output_item.done", output_index=self._index, item=item),
            ]
        )

    def _of_text(self, what: str, /, **content: Any) -> bytes:
        return self._of_item(f"response.{PARTS[self._open]}.{what}", **content)

    def _of_item(self, name: str, /, **content: Any) -> bytes:
        item = self._item(self._open, [])
        return self._event(name, item_id=item["id"], output_index=self._index, content_index=0, **content)

    def _event(self, name: str, /, **content: Any) -> bytes:
        begin = b""
        if not self._sequence:
            self._sequence = 1
            head = _head(self._request, self._number)
            begin = event({"type": CREATED, "sequence_number": 0, "response": head}, CREATED)
        self._sequence += 1
        return begin + event({"type": name, "sequence_number": self._sequence - 1, **content}, name)


def _broken(content: dict[str, Any]) -> bytes:
    error = content["error"]
    said = {"type": "error", "code": error["code"], "message": error["message"], "param": None, "sequence_number": 0}
    return event(said, "error")


RESPONSES = Dialect(
    name="Responses",
    path="responses",
    fields=FIELDS,
    read=read_request,
    written=response,
    stream=Events,
    refusal=openai_error,
    broken=_broken,
)
