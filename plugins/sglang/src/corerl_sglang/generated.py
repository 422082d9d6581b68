"""The parts of a server's answer to `/generate` that we read: a list with one `Sample` per row."""

from __future__ import annotations

from typing import Any

import msgspec


# Untracked by Python's garbage collector: tens of thousands are created at once, while the rollout waits, and would
# trigger collections of the whole process, which take longer than parsing the answer.
class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """SGLang sends [log-prob, id, text]; the text is ignored, since it is null."""

    logprob: float | None  # None if not finite, which JSON cannot express
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
