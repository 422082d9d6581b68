"""What the engine makes of a server's answers: rows that a pause has cut, rows that the server cannot finish, and the
experts of both. SGLang 0.5.17 says "abort" of a cut row also where its last token would have ended it."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from corerl.errors import EngineFailed
from corerl.rollout.engine import GenerateRequest, Generation, SamplingParams
from corerl.rollout.partial import continued, joined
from corerl_sglang.config import SglangConfig
from corerl_sglang.engine import SglangEngine

STOP, LEFT = 7, 8
PROMPT = [1, 2, 3]


class Answers:
    """A server that has drawn this for every row."""

    def __init__(self, tokens: list[int], reason: str, *, expert: int | None, version: int, read: int) -> None:
        """`read` tokens stood there before."""
        told: dict[str, Any] = {
            "finish_reason": {"type": reason},
            "weight_version": str(version),
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        }
        if expert is not None:  # of two layers, one of them with experts
            known = np.full((read + len(tokens) - 1, 2, 2), expert, np.int32)
            told["routed_experts"] = base64.b64encode(known.tobytes()).decode()
        self._sample = {"output_ids": tokens, "meta_info": told}

    def post(self, path: str, body: Any) -> bytes:
        return json.dumps([self._sample] * len(body["input_ids"])).encode()


def answered(server: Any, request: GenerateRequest, version: int, *, paused: bool) -> Generation:
    engine = object.__new__(SglangEngine)  # nothing is started
    engine._options = SglangConfig(routed_experts=True)
    engine._context = SimpleNamespace(name="engine-0")  # type: ignore[assignment]
    engine._serving = SimpleNamespace(paused=paused)  # type: ignore[assignment]
    engine._server = server
    engine._layers, engine._expert_layers, engine._chosen = 2, [1], 2
    return engine._generate(request, version)


def request_of(prompt: list[int]) -> GenerateRequest:
    params = SamplingParams(max_tokens=LEFT, stop_tokens=(STOP,), routed_experts=True)
    return GenerateRequest(
        tokens=np.array(prompt), offsets=np.array([0, len(prompt)]), noise_keys=np.array([5]), params=params
    )


def test_tokens_of_a_cut_row_keep_the_experts_of_the_weights_that_drew_them() -> None:
    request = request_of(PROMPT)
    cut = answered(Answers([4, 5, 6], "abort", expert=1, version=3, read=3), request, 3, paused=True)
    assert cut.unfinished.tolist() == [True]
    rest = continued(request, cut)
    more = answered(Answers([4, STOP], "stop", expert=2, version=4, read=6), rest, 4, paused=False)
    whole = joined(request, cut, more)
    assert whole.versions.tolist() == [3, 3, 3, 4, 4]
    # Nothing was known of the cut part's last token, nor is of the whole one's.
    assert whole.routed_experts is not None
    assert whole.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 1, 1, 2, 2, -1]


@pytest.mark.parametrize("drawn", [[4, 5, STOP], [4, 5, 6, 4, 5, 6, 4, 5]])
def test_a_row_that_was_cut_at_its_end_is_finished_and_has_its_experts(drawn: list[int]) -> None:
    server = Answers(drawn, "abort", expert=1, version=3, read=3)
    ended = answered(server, request_of(PROMPT), 3, paused=True)
    assert ended.unfinished.tolist() == [False]
    assert ended.routed_experts is not None
    assert ended.routed_experts[:, 0, 0].tolist() == [1] * (2 + len(drawn)) + [-1]
    silent = Answers(drawn, "abort", expert=None, version=3, read=3)
    with pytest.raises(EngineFailed, match="did not tell through which experts"):
        answered(silent, request_of(PROMPT), 3, paused=True)


@pytest.mark.parametrize(("drawn", "expert"), [([], 1), ([4], None)])
def test_of_a_row_that_was_cut_as_it_was_read_no_experts_are_known(drawn: list[int], expert: int | None) -> None:
    server = Answers(drawn, "abort", expert=expert, version=3, read=3)
    cut = answered(server, request_of(PROMPT), 3, paused=True)
    assert cut.unfinished.tolist() == [True]
    assert cut.routed_experts is not None and (cut.routed_experts == -1).all()


def test_a_server_that_cannot_hold_a_whole_row_is_told_by_what_is_too_small() -> None:
    server = Answers([4, 5, 6], "length", expert=1, version=3, read=3)
    with pytest.raises(EngineFailed) as caught:
        answered(server, request_of(PROMPT), 3, paused=False)
    assert caught.value.message == (
        "engine-0: its server ended a sample after 3 of 8 tokens: its KV cache or its context holds no more; raise "
        "engines.sglang.memory or server.max_total_tokens, or lower rollout.max_tokens"
    )
