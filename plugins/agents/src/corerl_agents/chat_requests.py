"""One request of a client and its answer, in whatever dialect both are written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import field, frozen

from corerl.types import Array, IntArray

if TYPE_CHECKING:
    from corerl_agents.conversation import Message  # which imports torch, for tokenizers

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # as tokens are decoded that end within a character


@frozen(kw_only=True)
class ChatRequest:
    """The parameters of a request that may differ from one request to the next; those at the end only say how an
    answer is written."""

    messages: Sequence[Message]  # with tool calls, tool results and reasoning as OpenAI's Chat Completions have them
    prompt_tokens: tuple[int, ...] = ()  # all tokens before the answer, in place of messages
    tools: Sequence[Mapping[str, Any]] = ()  # as Chat Completions have them
    most_calls: int | None = None  # calls of tools that are read from the answer; 0: tools are not shown; None: all
    template_options: Mapping[str, Any] = field(factory=dict)  # besides the run's own
    max_tokens: int | None = None  # None: as many as the episode has left
    stop: Sequence[str] = ()
    counts: bool = False  # asks only for the tokens before the answer
    logprobs: bool = False
    token_ids: bool = False
    stream: bool = False
    stream_usage: bool = False


@frozen(kw_only=True, eq=False)
class ChatAnswer:
    """The answer to a `ChatRequest`."""

    text: str
    reasoning: str = ""  # where it is not in the text
    tool_calls: Sequence[Mapping[str, Any]] = ()  # in OpenAI's shape
    finish_reason: str  # stop, tool_calls or length
    stopped: str = ""  # the text of the request's `stop` that has ended the answer
    prompt_token_ids: IntArray  # [n] before the answer
    token_ids: IntArray = field(factory=lambda: np.zeros(0, np.int64))  # [m]
    tokens: Sequence[str] = ()  # [m] as texts, if log-probs were asked for
    logprobs: Sequence[float] = ()  # [m] likewise
    versions: IntArray = field(factory=lambda: np.zeros(0, np.int64))  # [m] of the weights that sampled each token
    routed_experts: Array | None = None  # [n + m, MoE layers, experts per token] as `Generation` has them


@frozen(kw_only=True)
class Piece:
    """What is known of an answer while it is sampled: whatever follows leaves these texts as they are."""

    text: str
    reasoning: str = ""  # where it is not in the text
    prompt_tokens: int  # tokens before the answer
    tokens: int  # sampled so far


OnPiece = Callable[[Piece], None]
# Awaited in the server's loop. Calls the second argument with what is known of a streamed answer. Raises Refused.
Answering = Callable[[ChatRequest, OnPiece], Awaitable[ChatAnswer]]
