"""What a dialect is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from attrs import frozen

from corerl_agents.chat_requests import ChatAnswer, ChatRequest, Piece
from corerl_agents.fields import Field

MODEL = "policy"  # the model's name in answers; requests may use any name
# What tables of fields say.
LIMIT = "limit for this answer; `rollout.max_tokens` still bounds the conversation"
NOT_CONSTRAINED = "sampling is not constrained, as the trainer's log-probs are those of all tokens"
THINKS = "whether and how long the policy thinks is its chat template's matter"
OTHER_TOOLS = (
    "passed to the chat template; the same in all requests of a conversation, others begin "
    "[another row](../agents.md#episodes-that-branch)"
)


class Stream(Protocol):
    """Writes one answer as server-sent events."""

    def piece(self, piece: Piece) -> bytes:
        """What has become known since the last piece; b"" if nothing has."""

    def end(self, answer: ChatAnswer) -> bytes:
        """The rest."""


@frozen(kw_only=True, eq=False)
class Dialect:
    """How clients of one API ask, and are answered."""

    name: str
    path: str  # of its POST, behind an episode's base URL
    fields: Mapping[str, Field]  # of a request's body, besides those of sampling
    # From the body, and the run's values of temperature, top_p and top_k, which requests may repeat. Raises Refused.
    read: Callable[[str | bytes, Mapping[str, float]], ChatRequest]
    written: Callable[[ChatAnswer, ChatRequest, int], dict[str, Any]]  # the last: the number of the answer
    stream: Callable[[ChatRequest, int], Stream] | None = None  # likewise; None if no request asks for one
    refusal: Callable[[str, str, int], dict[str, Any]]  # message, code and status
    broken: Callable[[dict[str, Any]], bytes]  # the event that ends a stream with this refusal


def openai_error(message: str, code: str, status: int) -> dict[str, Any]:
    what = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": what, "param": None, "code": code}}


def event(content: Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content)}\n\n".encode()


class Sent:
    """What has been sent of an answer's texts, by their kinds."""

    def __init__(self, *kinds: str) -> None:
        self.texts = dict.fromkeys(kinds, "")

    def news(self, *texts: str) -> Iterator[tuple[str, str]]:
        """What is new of each text, in the order of the kinds; it counts as sent."""
        for kind, whole in zip(self.texts, texts, strict=True):
            if delta := new(whole, self.texts[kind]):
                self.texts[kind] += delta
                yield kind, delta


def new(whole: str, sent: str) -> str:
    """What of a text is still to be sent. White space where it begins may be sent and not belong to it."""
    for begin in (sent, sent.lstrip()):
        if whole.startswith(begin):
            return whole[len(begin) :]
    return ""
