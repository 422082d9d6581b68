"""OpenAI's Chat Completions: every field of the body is taken, or refused by name."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

from corerl_agents.chat_requests import UNFINISHED, ChatAnswer, ChatRequest, Piece
from corerl_agents.dialects.base import LIMIT, MODEL, NOT_CONSTRAINED, OTHER_TOOLS, Dialect, Sent, event, openai_error
from corerl_agents.fields import (
    COUNT,
    NOBODYS,
    OBJECT,
    OBJECTS,
    SWITCH,
    TEXT,
    WHOLE,
    Field,
    Values,
    checked,
    honoured,
    ignored,
    is_list,
    never,
    of_kind,
    only,
    read_object,
)
from corerl_agents.refused import Refused

STOP = Values(
    wanted="a string or a list of strings",
    fits=lambda value: isinstance(value, str) or is_list(value, str),
    taken=("Observation:", ["\n\n", "###"]),
    refused=(3, [3]),
)
STREAM_OPTIONS = Values(
    wanted="an object with 'include_usage', True or False",
    fits=lambda value: (
        isinstance(value, dict)
        and value.keys() <= {"include_usage"}
        and all(isinstance(each, bool) for each in value.values())
    ),
    taken=({"include_usage": True},),
    refused=({"include_obfuscation": True},),
)
TOOL = {"type": "function", "function": {"name": "add"}}
OPTION = "how much a model thinks is an option of its chat template, if it has one: send chat_template_kwargs"
OPENAIS = "it is a service of OpenAI's; leave it out"
SAMPLED = "only text is sampled; leave it out"

FIELDS: Mapping[str, Field] = {
    "messages": honoured(
        of_kind(list, "a list of messages", taken=[{"role": "user", "content": "hello"}], refused="hello"),
        "text content; roles that the chat template knows; a last message of the assistant is the beginning of the "
        "answer, and stays a message of its own before it",
    ),
    "max_tokens": honoured(COUNT, LIMIT),
    "max_completion_tokens": honoured(COUNT, LIMIT),
    "stop": honoured(
        STOP, "texts that end the answer, of any length, in addition to `rollout.stop` and the model's own end tokens"
    ),
    "tools": honoured(
        OBJECTS,
        OTHER_TOOLS,
        taken=([], [TOOL]),
    ),
    "tool_choice": only(
        "auto",
        "none",
        refused=("required", TOOL),
        becomes="honoured",
        why='with `"none"`, a first request shows no tools to the model; a later one leaves those that were shown; '
        f"calls stay text. A call cannot be required: {NOT_CONSTRAINED}",
        do="leave it out",
    ),
    "parallel_tool_calls": honoured(SWITCH, "with `false`, only the first call of an answer is returned"),
    "chat_template_kwargs": honoured(
        OBJECT,
        "arguments of the chat template for this request, before those of `data.chat_template_options`; one that the "
        "template does not read is refused, and a change that would write earlier messages in other words begins "
        "another row",
        taken=({"enable_thinking": False},),
        refused=([],),
    ),
    # How the answer is written.
    "logprobs": honoured(SWITCH, "those of the sampled tokens"),
    "top_logprobs": only(0, refused=(5,), why="no other tokens'"),
    "return_token_ids": honoured(SWITCH, "adds `prompt_token_ids`, and `token_ids` to the choice, as vLLM does"),
    "stream": honoured(
        SWITCH,
        "[events while the answer is sampled](../agents.md#streams); `episode.chat` returns the choice all the same",
    ),
    "stream_options": honoured(STREAM_OPTIONS, "a chunk with the usage before `[DONE]`"),
    # What says whose request it is. Noise does not come from a request's seed: what is sampled is the run's to repeat.
    "model": ignored(TEXT, NOBODYS),
    "user": ignored(TEXT, NOBODYS),
    "metadata": ignored(OBJECT, NOBODYS),
    "safety_identifier": ignored(TEXT, NOBODYS),
    "prompt_cache_key": ignored(TEXT, NOBODYS),
    "seed": ignored(WHOLE, "[the run's seed](../agents.md#sampling-does-not-depend-on-timing) decides what is sampled"),
    # What would change the answer with any other value.
    "n": only(1, refused=(2, True), why="the number of samples is the run's"),
    "response_format": only(
        {"type": "text"}, refused=({"type": "json_object"}, {"type": "json_schema"}), why=NOT_CONSTRAINED
    ),
    "presence_penalty": only(0, refused=(0.5, False)),
    "frequency_penalty": only(0, refused=(0.5, False)),
    "repetition_penalty": only(1, refused=(1.1, True)),
    "length_penalty": only(1, refused=(1.1, True)),
    "logit_bias": only({}, refused=({"50256": -100},)),
    "min_p": only(0, refused=(1,)),
    "min_tokens": only(0, refused=(1,)),
    "use_beam_search": only(False, refused=(True, 0)),
    "ignore_eos": only(False, refused=(True, 0)),
    "stop_token_ids": only([], refused=([7],), why="use `stop`"),
    "bad_words": only([], refused=(["7"],), why="use `stop`"),
    "include_stop_str_in_output": only(False, refused=(True, 0)),
    "skip_special_tokens": only(True, refused=(False,)),
    "spaces_between_special_tokens": only(True, refused=(False,)),
    "store": only(False, refused=(True, 0), why="nothing is stored"),
    "reasoning_effort": never(OPTION, refused=("low",)),
    "verbosity": never(OPTION, refused=("low",)),
    "functions": never("send tools", refused=([],)),
    "function_call": never("send tool_choice", refused=("auto",)),
    "audio": never(SAMPLED, refused=({},)),
    "modalities": never(SAMPLED, refused=(["text"],)),
    "prediction": never(OPENAIS, refused=({},)),
    "service_tier": never(OPENAIS, refused=("auto",)),
    "web_search_options": never(OPENAIS, refused=({},)),
    "moderation": never(OPENAIS, refused=({},)),
    "prompt_cache_options": never(OPENAIS, refused=({},)),
    "prompt_cache_retention": never(OPENAIS, refused=("24h",)),
}


def read_request(body: str | bytes, sampling: Mapping[str, float]) -> ChatRequest:
    """`sampling`: the run's values of temperature, top_p and top_k, which requests may repeat. Raises Refused."""
    wanted = "messages: missing or not a list; send a list of messages"
    asked = read_object(body, wanted)
    if not isinstance(asked.get("messages"), list):
        raise Refused(wanted)
    given = checked(asked, FIELDS, sampling)
    stop = given.get("stop", ())
    limits = [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]
    most_calls = None if given.get("parallel_tool_calls", True) else 1
    return ChatRequest(
        messages=given["messages"],
        tools=given.get("tools", ()),
        most_calls=0 if given.get("tool_choice") == "none" else most_calls,
        template_options=given.get("chat_template_kwargs", {}),
        max_tokens=min(limits, default=None),
        stop=[stop] if isinstance(stop, str) else stop,
        logprobs=given.get("logprobs", False),
        token_ids=given.get("return_token_ids", False),
        stream=given.get("stream", False),
        stream_usage=given.get("stream_options", {}).get("include_usage", False),
    )


def completion(answer: ChatAnswer, request: ChatRequest, number: int) -> dict[str, Any]:
    """Format the answer as OpenAI's `chat.completion`; token ids are where vLLM has them."""
    before, said = len(answer.prompt_token_ids), len(answer.token_ids)
    calls = {"tool_calls": copy.deepcopy(list(answer.tool_calls))} if answer.tool_calls else {}  # the client's own
    reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    message = {"role": "assistant", "content": answer.text or (None if calls else ""), **reasoning, **calls}
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": answer.finish_reason,
                "logprobs": {"content": logprobs_of(answer)} if request.logprobs else None,
                **({"token_ids": answer.token_ids.tolist()} if request.token_ids else {}),
            }
        ],
        "usage": {"prompt_tokens": before, "completion_tokens": said, "total_tokens": before + said},
        **({"prompt_token_ids": answer.prompt_token_ids.tolist()} if request.token_ids else {}),
    }


def logprobs_of(answer: ChatAnswer) -> list[dict[str, Any]]:
    """As OpenAI writes them. A token that ends within a character has no bytes: its text does not say which."""
    found = []
    for token, logprob in zip(answer.tokens, answer.logprobs, strict=True):
        known = None if UNFINISHED in token else list(token.encode())
        found.append({"token": token, "logprob": logprob, "bytes": known, "top_logprobs": []})
    return found


class Chunks:
    """The answer as chunks: of texts as they become known, then one with the rest, calls, log-probs and token ids."""

    def __init__(self, request: ChatRequest, number: int) -> None:
        self._request, self._number = request, number
        self._head = {"id": f"chatcmpl-{number}", "created": int(time.time()), "model": MODEL}
        self._head["object"] = "chat.completion.chunk"
        self._role: dict[str, str] = {"role": "assistant"}  # until it is sent
        self._sent = Sent("content", "reasoning_content")

    def piece(self, piece: Piece) -> bytes:
        if not (delta := dict(self._sent.news(piece.text, piece.reasoning))):
            return b""
        choice = {"index": 0, "delta": {**self._role, **delta}, "finish_reason": None, "logprobs": None}
        self._role = {}
        return event({**self._head, "choices": [choice], **({"usage": None} if self._request.stream_usage else {})})

    def end(self, answer: ChatAnswer) -> bytes:
        whole = completion(answer, self._request, self._number)
        (choice,) = whole["choices"]
        delta = choice["message"]
        calls = [{"index": index, **call} for index, call in enumerate(delta.pop("tool_calls", ()))]
        if not self._role:  # a part has been sent
            delta = dict(self._sent.news(answer.text, answer.reasoning))
        delta |= {"tool_calls": calls} if calls else {}
        streamed = {key: value for key, value in choice.items() if key != "message"}
        ids = {key: value for key, value in whole.items() if key == "prompt_token_ids"}
        chunks = [{**self._head, "choices": [{**streamed, "delta": delta}], **ids}]
        if self._request.stream_usage:
            chunks = [{**chunks[0], "usage": None}, {**self._head, "choices": [], "usage": whole["usage"]}]
        return b"".join(map(event, chunks)) + b"data: [DONE]\n\n"


CHAT = Dialect(
    name="Chat Completions",
    path="chat/completions",
    fields=FIELDS,
    read=read_request,
    written=completion,
    stream=Chunks,
    refusal=openai_error,
    broken=event,
)
