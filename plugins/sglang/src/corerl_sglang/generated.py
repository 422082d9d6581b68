"""What a server answers to `/generate`, as far as it is read here: a list of one `Sample` for each row."""

from __future__ import annotations

from typing import Any

import msgspec


# Not seen by Python's garbage collector: tens of thousands come at once, when a rollout waits for nothing else, and for
# them it would go through all that the process holds, which takes longer than reading the answer.
class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """SGLang tells [log-prob, id, text]; the text is passed over, as it is null."""

    logprob: float | None  # None where it is not a finite number: JSON has none
    id: int


class Told(msgspec.Struct, frozen=True, kw_only=True):
    finish_reason: dict[str, Any]
    weight_version: str
    output_token_logprobs: list[Token] = []
    routed_experts: str | None = None  # base64 of int32


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    output_ids: list[int]
    meta_info: Told


read_samples = msgspec.json.Decoder(list[Sample]).decode
