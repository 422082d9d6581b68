"""Requests and answers in a few words, and the wait of a run whose engines die."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.engines.fleet import EngineFleet


def request_of(rows: Sequence[Sequence[int]], *, first_key: int = 0, **params: Any) -> GenerateRequest:
    """Prompts of these tokens, whose noise keys count from `first_key`."""
    return GenerateRequest(
        tokens=np.array([token for row in rows for token in row], dtype=np.int64),
        offsets=np.cumsum([0, *map(len, rows)]),
        noise_keys=np.arange(first_key, first_key + len(rows)),
        params=SamplingParams(**params),
    )


def generation_of(
    rows: Sequence[Sequence[int]], *, truncated: bool | Sequence[bool] = False, unfinished: Any = None
) -> Generation:
    """Responses of these tokens, by the weights of version 0."""
    total = sum(map(len, rows))
    return Generation(
        tokens=np.array([token for row in rows for token in row], dtype=np.int64),
        offsets=np.cumsum([0, *map(len, rows)]),
        logprobs=np.zeros(total, np.float32),
        versions=np.zeros(total, np.int64),
        truncated=np.full(len(rows), truncated),
        unfinished=np.zeros(len(rows), np.bool_) if unfinished is None else unfinished,
    )


def serve(fleet: EngineFleet, work: Coroutine[Any, Any, Any], ensure: Callable[[], None]) -> Any:
    """Wait for work that samples; `ensure` brings engines back each time that none is left. As a run does it."""
    future = fleet.loop.begin(work)
    try:
        while not fleet.wait(future):
            with fleet.replacing():
                ensure()
        return future.result()
    except BaseException:
        future.cancel()
        raise
