"""Read chat requests in OpenAI's format: every field of the body is taken, or refused by name; none is ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from corerl.data import parse_json
from corerl.messages import did_you_mean, short_repr, shorten
from corerl_agents.conversation import SHOWN, Message
from corerl_agents.refused import Refused


@frozen(kw_only=True)
class ChatRequest:
    """The parameters of a chat request that may differ from one request to the next; those at the end only say how an
    answer is written."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    most_calls: int | None = None  # calls of tools that are read from the answer; 0: tools are not shown; None: all
    template_options: Mapping[str, Any] = field(factory=dict)  # besides the run's own
    max_tokens: int | None = None  # None: as many as the episode has left
    stop: Sequence[str] = ()
    logprobs: bool = False
    token_ids: bool = False
    stream: bool = False
    stream_usage: bool = False


@frozen(kw_only=True)
class Field:
    """The values that a field may have, besides null, which is as good as leaving it out."""

    wanted: str
    fits: Callable[[Any], bool]
    code: str = "invalid_request"  # of the error for any other value


def _kind(kind: type, wanted: str) -> Field:
    return Field(wanted=wanted, fits=lambda value: isinstance(value, kind))


def _list_of(kind: type, wanted: str) -> Field:
    return Field(wanted=wanted, fits=lambda value: _is_list(value, kind))


def _only(*values: Any) -> Field:
    wanted = f"{' or '.join(map(repr, values))}; leave it out"
    return Field(
        wanted=wanted, fits=lambda value: any(_same(value, each) for each in values), code="unsupported_parameter"
    )


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _same(value: Any, wanted: Any) -> bool:
    """Equal, with false no 0 and true no 1."""
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


COUNT = Field(
    wanted="a whole number of at least 1",
    fits=lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1,
)
TEXT, SWITCH, OBJECT = _kind(str, "a string"), _kind(bool, "True or False"), _kind(dict, "an object")

FIELDS: Mapping[str, Field] = {
    "messages": _kind(list, "a list of messages"),
    "max_tokens": COUNT,
    "max_completion_tokens": COUNT,
    "stop": Field(
        wanted="a string or a list of strings", fits=lambda value: isinstance(value, str) or _is_list(value, str)
    ),
    "tools": _list_of(dict, "a list of objects"),
    "tool_choice": _only("auto", "none"),
    "parallel_tool_calls": SWITCH,
    "chat_template_kwargs": OBJECT,
    # How the answer is written.
    "logprobs": SWITCH,
    "top_logprobs": _only(0),
    "return_token_ids": SWITCH,
    "stream": SWITCH,
    "stream_options": Field(
        wanted="an object with 'include_usage', True or False",
        fits=lambda value: (
            isinstance(value, dict)
            and value.keys() <= {"include_usage"}
            and all(isinstance(each, bool) for each in value.values())
        ),
    ),
    # What says whose request it is. Noise does not come from a request's seed: what is sampled is the run's to repeat.
    "model": TEXT,
    "user": TEXT,
    "metadata": OBJECT,
    "safety_identifier": TEXT,
    "prompt_cache_key": TEXT,
    "seed": Field(wanted="a whole number", fits=lambda value: isinstance(value, int) and not isinstance(value, bool)),
    # What would change the answer with any other value.
    "n": _only(1),
    "response_format": _only({"type": "text"}),
    "presence_penalty": _only(0),
    "frequency_penalty": _only(0),
    "repetition_penalty": _only(1),
    "length_penalty": _only(1),
    "logit_bias": _only({}),
    "min_p": _only(0),
    "min_tokens": _only(0),
    "use_beam_search": _only(False),
    "ignore_eos": _only(False),
    "stop_token_ids": _only([]),
    "bad_words": _only([]),
    "include_stop_str_in_output": _only(False),
    "skip_special_tokens": _only(True),
    "spaces_between_special_tokens": _only(True),
    "store": _only(False),
}


OPTION = "how much a model thinks is an option of its chat template, if it has one: send chat_template_kwargs"
OPENAIS = "it is a service of OpenAI's; leave it out"
# Fields of OpenAI's requests that are refused whatever their value, and what to do instead.
REFUSED: Mapping[str, str] = {
    "reasoning_effort": OPTION,
    "verbosity": OPTION,
    "functions": "send tools",
    "function_call": "send tool_choice",
    "audio": "only text is sampled; leave it out",
    "modalities": "only text is sampled; leave it out",
    "prediction": OPENAIS,
    "service_tier": OPENAIS,
    "web_search_options": OPENAIS,
    "moderation": OPENAIS,
    "prompt_cache_options": OPENAIS,
    "prompt_cache_retention": OPENAIS,
}


def read_request(body: str | bytes, sampling: Mapping[str, float]) -> ChatRequest:
    """`sampling`: the run's values of temperature, top_p and top_k, which requests may repeat. Raises Refused."""
    try:
        asked = parse_json(body)
    except ValueError as error:
        raise Refused(f"the request is not valid JSON: {error}") from error
    if not isinstance(asked, dict) or not isinstance(asked.get("messages"), list):
        raise Refused("messages: missing or not a list; send a list of messages")
    for name, value in asked.items():
        _require_fitting(name, value, sampling)
    given = {name: value for name, value in asked.items() if value is not None}
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


def _require_fitting(name: str, value: Any, sampling: Mapping[str, float]) -> None:
    def got() -> str:  # only where it is refused: the messages alone may be long
        return f"{shorten(name, SHOWN)}: got {short_repr(value, SHOWN)}"

    if name in sampling:
        own = sampling[name]
        off = name == "top_k" and own == 0 and _same(value, -1)  # as other servers write that it is off
        if value is not None and not off and not _same(value, own):
            raise Refused(
                f"{got()}, but this run samples with rollout.{name}={own!r}, as its loss assumes; leave it out",
                code="unsupported_parameter",
            )
    elif name in REFUSED:
        raise Refused(f"{got()}, wanted no such field: {REFUSED[name]}", code="unsupported_parameter")
    elif name not in FIELDS:
        raise Refused(
            f"{got()}, wanted no such field{did_you_mean(name, [*FIELDS, *sampling])}; leave it out",
            code="unsupported_parameter",
        )
    elif value is not None and not FIELDS[name].fits(value):
        raise Refused(f"{got()}, wanted {FIELDS[name].wanted}", code=FIELDS[name].code)
