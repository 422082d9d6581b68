"""Anthropic's Messages: blocks become the messages of a conversation, and an answer becomes blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve

from corerl.messages import short_repr
from corerl_agents.chat_requests import ChatAnswer, ChatRequest, Piece
from corerl_agents.dialects.base import LIMIT, MODEL, NOT_CONSTRAINED, OTHER_TOOLS, THINKS, Dialect, Sent, event
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
    of_kind,
    read_object,
)
from corerl_agents.refused import SHOWN, Refused

ANTHROPICS = "it is a service of Anthropic's; leave it out"
TOOL = {"name": "add", "input_schema": {"type": "object"}}
KINDS_OF_THINKING = ("disabled", "enabled", "adaptive", "between_tools")


def _keeps_all(value: Any) -> bool:
    """Whether nothing is taken out of the messages."""
    if not isinstance(value, dict) or not is_list(value.get("edits", []), dict):
        return False
    return all(edit.get("keep") == "all" for edit in value.get("edits", []))


FIELDS: Mapping[str, Field] = {
    "messages": honoured(
        of_kind(list, "a list of messages", taken=[{"role": "user", "content": "hello"}], refused="hello"),
        "text, pictures as `base64` or `data:` URLs, `tool_use`, `tool_result`, `thinking`; other blocks are refused. "
        "Roles and a last message of the assistant as in Chat Completions; each `tool_result` is a message of the role "
        "`tool`, before the text of its message",
    ),
    "system": honoured(
        Values(
            wanted="a string or a list of text blocks",
            fits=lambda value: isinstance(value, str) or is_list(value, dict),
            taken=("You add.", [{"type": "text", "text": "You add."}]),
            refused=(3, [3]),
        ),
        "a first message of the role `system`",
    ),
    "max_tokens": honoured(COUNT, f"{LIMIT}. Need not be given"),
    "stop_sequences": honoured(
        Values(
            wanted="a list of strings", fits=lambda value: is_list(value, str), taken=(["###"],), refused=("###", [3])
        ),
        "texts that end the answer, in addition to `rollout.stop`; `stop_sequence` says which has",
    ),
    "tools": honoured(
        OBJECTS, f"{OTHER_TOOLS}. Tools that Anthropic runs are refused by their `type`", taken=([TOOL],)
    ),
    "tool_choice": honoured(
        Values(
            wanted="an object of the type 'auto' or 'none', as a call cannot be required; leave it out",
            fits=lambda value: (
                isinstance(value, dict)
                and value.get("type") in ("auto", "none")
                and value.keys() <= {"type", "disable_parallel_tool_use"}
                and isinstance(value.get("disable_parallel_tool_use", False), bool)
            ),
            taken=({"type": "none"}, {"type": "auto", "disable_parallel_tool_use": True}),
            refused=({"type": "any"}, {"type": "tool", "name": "add"}),
        ),
        f"as in Chat Completions. A call cannot be required: {NOT_CONSTRAINED}",
    ),
    "stream": honoured(SWITCH, "[events while the answer is sampled](../agents.md#streams)"),
    "model": ignored(TEXT, NOBODYS),
    "metadata": ignored(OBJECT, NOBODYS, taken=({"user_id": "7"},)),
    "cache_control": ignored(OBJECT, "engines keep what they have read", taken=({"type": "ephemeral"},)),
    "service_tier": ignored(TEXT, NOBODYS),
    "speed": ignored(TEXT, NOBODYS),
    "inference_geo": ignored(TEXT, NOBODYS),
    "user_profile_id": ignored(TEXT, NOBODYS),
    "workspace_id": ignored(TEXT, NOBODYS),
    "diagnostics": ignored(OBJECT, "nothing is diagnosed"),
    "thinking": ignored(
        Values(
            wanted=f"an object of the type {', '.join(KINDS_OF_THINKING)}",
            fits=lambda value: isinstance(value, dict) and value.get("type") in KINDS_OF_THINKING,
            taken=({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}),
            refused=({"type": "loud"}, True),
        ),
        f'{THINKS}. With `reasoning = "separate"` an answer\'s reasoning is its first block',
    ),
    "output_config": ignored(
        Values(
            wanted="an object with 'effort' alone",
            fits=lambda value: isinstance(value, dict) and value.keys() <= {"effort"},
            taken=({"effort": "low"},),
            refused=({"format": {"type": "json_schema", "schema": {}}},),
        ),
        f"{THINKS}. A format is refused: {NOT_CONSTRAINED}",
    ),
    "context_management": ignored(
        Values(
            wanted="an object with 'edits' that keep all; shorten the messages yourself",
            fits=_keeps_all,
            taken=({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
            refused=({"edits": [{"type": "clear_tool_uses_20250919"}]},),
        ),
        "messages are those that were sent",
    ),
    "container": never(ANTHROPICS, refused=("any",)),
    "mcp_servers": never(ANTHROPICS, refused=([{}],)),
    "betas": never("send the header anthropic-beta, which is ignored", refused=(["any"],)),
    "billing_policy": never(ANTHROPICS, refused=({},)),
    "compaction": never(ANTHROPICS, refused=({},)),
    "fallback_credit_token": never(ANTHROPICS, refused=("any",)),
    "fallbacks": never(ANTHROPICS, refused=([],)),
    "thread": never(ANTHROPICS, refused=({},)),
}
# Of a tool, besides its name, description and schema; those ignored say how Anthropic reads calls or keeps prompts.
OF_TOOLS = {"type", "cache_control", "strict", "eager_input_streaming", "input_examples", "allowed_callers"}


def read_request(body: str | bytes, sampling: Mapping[str, float]) -> ChatRequest:
    """`sampling`: the run's values of temperature, top_p and top_k, which requests may repeat. Raises Refused."""
    wanted = "messages: missing or not a list; send a list of messages"
    asked = read_object(body, wanted)
    if not isinstance(asked.get("messages"), list):
        raise Refused(wanted)
    given = checked(asked, FIELDS, sampling)
    messages = [each for number, message in enumerate(given["messages"]) for each in _messages(number, message)]
    if "system" in given:
        messages.insert(0, {"role": "system", "content": _content("system", given["system"])})
    choice = given.get("tool_choice", {})
    most_calls = 1 if choice.get("disable_parallel_tool_use") else None
    return ChatRequest(
        messages=messages,
        tools=[_tool(number, tool) for number, tool in enumerate(given.get("tools", ()))],
        most_calls=0 if choice.get("type") == "none" else most_calls,
        max_tokens=given.get("max_tokens"),
        stop=given.get("stop_sequences", ()),
        stream=given.get("stream", False),
    )


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    where = f"tools[{number}]"
    if tool.get("type") not in (None, "custom"):
        raise Refused(f"{where}.type: got {short_repr(tool['type'], SHOWN)}, wanted 'custom': {ANTHROPICS}")
    if not isinstance(tool.get("name"), str):
        raise Refused(f"{where}.name: got {short_repr(tool.get('name'), SHOWN)}, wanted a string")
    function = {"name": tool["name"]}
    function |= {"description": tool["description"]} if tool.get("description") else {}
    function |= {"parameters": tool["input_schema"]} if "input_schema" in tool else {}
    if unknown := sorted(tool.keys() - OF_TOOLS - {"name", "description", "input_schema"}):
        raise Refused(f"{where}.{unknown[0]}: got {short_repr(tool[unknown[0]], SHOWN)}, wanted no such field")
    return {"type": "function", "function": function}


def _messages(number: int, message: Any) -> Iterator[dict[str, Any]]:
    """The messages of a conversation that one of Anthropic's is: each result of a tool is one."""
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise Refused(f"{where}: got {short_repr(message, SHOWN)}, wanted an object")
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        yield _said(where, content)
        return
    blocks = content if isinstance(content, list) else []
    results = [block for block in blocks if isinstance(block, Mapping) and block.get("type") == "tool_result"]
    for block in results:
        result = _content(f"{where}.content", block.get("content") or "")
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
    rest = [block for block in blocks if block not in results] if results else content
    if rest or not results:
        yield {"role": role, "content": _content(f"{where}.content", rest)}


def _content(where: str, content: Any) -> Any:
    """Text and pictures as parts of a message."""
    if not isinstance(content, list):
        return content  # a text, or what is refused where messages are read
    return [_part(f"{where}[{number}]", block) for number, block in enumerate(content)]


def _part(where: str, block: Any) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text":
        return {"type": "text", "text": block.get("text")}
    if kind == "image":
        source = block.get("source") or {}
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise Refused(
        f"{where}: got {short_repr(block, SHOWN)}, wanted a block of the type 'text' or 'image'; send it as text"
    )


def _said(where: str, content: Any) -> dict[str, Any]:
    """A message of the assistant, whose blocks are reasoning, text and calls."""
    blocks: Sequence[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
    text, reasoning, calls = list[str](), list[str](), list[dict[str, Any]]()
    for number, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            text.append(block.get("text") or "")
        elif kind == "thinking":
            reasoning.append(block.get("thinking") or "")
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"), ensure_ascii=False)}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            raise Refused(
                f"{where}.content[{number}]: got {short_repr(block, SHOWN)}, wanted a block of the type 'text', "
                "'thinking' or 'tool_use'"
            )
    message: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
    message |= {"reasoning_content": "".join(reasoning)} if reasoning else {}
    return message | ({"tool_calls": calls} if calls else {})


# Opaque to clients; some take reasoning without one for another model's and send it back as text.
SIGNATURE = "none"
STOPPED = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


def message(answer: ChatAnswer, request: ChatRequest, number: int) -> dict[str, Any]:
    """Format the answer as Anthropic's `Message`."""
    return {
        **_head(number),
        "content": list(_blocks(answer)),
        **_stop(answer),
        "usage": _usage(len(answer.prompt_token_ids), len(answer.token_ids)),
    }


def _head(number: int) -> dict[str, Any]:
    return {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": MODEL}


def _stop(answer: ChatAnswer) -> dict[str, str | None]:
    by_text = answer.finish_reason == "stop" and bool(answer.stopped)
    reason = "stop_sequence" if by_text else STOPPED[answer.finish_reason]
    return {"stop_reason": reason, "stop_sequence": answer.stopped if by_text else None}


def _usage(before: int, said: int) -> dict[str, int]:
    return {"input_tokens": before, "output_tokens": said}


def _blocks(answer: ChatAnswer) -> Iterator[dict[str, Any]]:
    if answer.reasoning:
        yield {"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE}
    if answer.text:
        yield {"type": "text", "text": answer.text}
    for call in answer.tool_calls:
        function = call["function"]
        given = json.loads(function["arguments"])
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


class Events:
    """The answer as events: of texts as they become known, then calls, and why the answer has ended."""

    def __init__(self, request: ChatRequest, number: int) -> None:
        self._number = number
        self._begun = False
        self._open = ""  # the kind of the block that is open
        self._index = -1  # its number
        self._sent = Sent("thinking", "text")

    def piece(self, piece: Piece) -> bytes:
        events = self._texts(piece.reasoning, piece.text)
        return self._begin(piece.prompt_tokens) + events if events else b""

    def end(self, answer: ChatAnswer) -> bytes:
        begin = self._begin(len(answer.prompt_token_ids))
        texts = self._texts(answer.reasoning, answer.text)
        calls = [self._call(block) for block in _blocks(answer) if block["type"] == "tool_use"]
        usage = _usage(len(answer.prompt_token_ids), len(answer.token_ids))
        last = _event("message_delta", delta=_stop(answer), usage=usage) + _event("message_stop")
        return b"".join([begin, texts, *calls, self._stop(), last])

    def _begin(self, prompt_tokens: int) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        head = {**_head(self._number), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**head, "usage": _usage(prompt_tokens, 0)})

    def _texts(self, reasoning: str, text: str) -> bytes:
        """What is new of each text, in a block of its kind."""
        events = b""
        for kind, delta in self._sent.news(reasoning, text):
            if self._open != kind:
                first = {"signature": SIGNATURE} if kind == "thinking" else {}
                events += self._start(kind, {"type": kind, kind: "", **first})
            events += self._delta(f"{kind}_delta", **{kind: delta})
        return events

    def _call(self, block: Mapping[str, Any]) -> bytes:
        start = self._start("tool_use", {**block, "input": {}})
        return start + self._delta("input_json_delta", partial_json=json.dumps(block["input"]))

    def _start(self, kind: str, block: Mapping[str, Any]) -> bytes:
        stop = self._stop()
        self._open, self._index = kind, self._index + 1
        return stop + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **content: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **content})

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", index=self._index)


def _event(name: str, **content: Any) -> bytes:
    return event({"type": name, **content}, name)


# By the status of HTTP, as Anthropic's server has them.
ERRORS = {404: "not_found_error", 500: "api_error"}


def refusal(message: str, code: str, status: int) -> dict[str, Any]:
    kind = ERRORS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


MESSAGES = Dialect(
    name="Messages",
    path="messages",
    fields=FIELDS,
    read=read_request,
    written=message,
    stream=Events,
    refusal=refusal,
    broken=lambda content: event(content, "error"),
)
COUNT_TOKENS = Dialect(
    name="Messages, counted",
    path="messages/count_tokens",
    fields=FIELDS,
    read=lambda body, sampling: evolve(read_request(body, sampling), counts=True, stream=False),
    written=lambda answer, request, number: {"input_tokens": len(answer.prompt_token_ids)},
    refusal=refusal,
    broken=MESSAGES.broken,
)
