"""Tokens in, tokens out: for clients that write and read tokens themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corerl_agents.chat_requests import ChatAnswer, ChatRequest
from corerl_agents.dialects.base import LIMIT, MODEL, Dialect, event, openai_error
from corerl_agents.dialects.chat import STOP
from corerl_agents.fields import COUNT, NOBODYS, TEXT, Field, Values, checked, honoured, ignored, is_whole, read_object
from corerl_agents.refused import Refused

FIELDS: Mapping[str, Field] = {
    "token_ids": honoured(
        Values(
            wanted="a list of token ids",
            fits=lambda value: isinstance(value, list) and all(is_whole(each) and each >= 0 for each in value),
            taken=([5, 6, 7],),
            refused=("hello", [-1], [True]),
        ),
        "all that is before the answer. They go on from the longest history of the episode whose tokens they repeat, "
        "whatever its dialect; else they begin another row",
    ),
    "max_tokens": honoured(COUNT, LIMIT),
    "stop": honoured(STOP, "as in Chat Completions"),
    "model": ignored(TEXT, NOBODYS),
}


def read_request(body: str | bytes, sampling: Mapping[str, float]) -> ChatRequest:
    """`sampling`: the run's values of temperature, top_p and top_k, which requests may repeat. Raises Refused."""
    wanted = "token_ids: missing or empty; send the ids of all tokens before the answer"
    given = checked(read_object(body, wanted), FIELDS, sampling)
    if not given.get("token_ids"):
        raise Refused(wanted)
    stop = given.get("stop", ())
    return ChatRequest(
        messages=(),
        prompt_tokens=tuple(given["token_ids"]),
        max_tokens=given.get("max_tokens"),
        stop=[stop] if isinstance(stop, str) else stop,
        logprobs=True,
    )


def sampled(answer: ChatAnswer, request: ChatRequest, number: int) -> dict[str, Any]:
    """What was sampled: each token with its log-prob and the version of the weights; experts of all tokens."""
    before, said = len(answer.prompt_token_ids), len(answer.token_ids)
    return {
        "id": f"tokens-{number}",
        "object": "tokens",
        "model": MODEL,
        "token_ids": answer.token_ids.tolist(),
        "logprobs": list(answer.logprobs),
        "versions": answer.versions.tolist(),
        "routed_experts": None if answer.routed_experts is None else answer.routed_experts.tolist(),
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": {"prompt_tokens": before, "completion_tokens": said, "total_tokens": before + said},
    }


TOKENS = Dialect(
    name="Tokens",
    path="tokens",
    fields=FIELDS,
    read=read_request,
    written=sampled,
    refusal=openai_error,
    broken=event,
)
