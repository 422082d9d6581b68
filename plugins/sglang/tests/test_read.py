"""What the engine makes of a server's answers: rows that a pause has cut, rows that the server cannot finish, and the
experts of both. SGLang 0.5.17 says "abort" of a cut row also where its last token would have ended it."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.engines import GenerateRequest, Generation, SamplingParams
from corerl.errors import EngineFailed
from corerl.pictures import Picture
from corerl_sglang.read import Experts, Parts, Reader, waited
from corerl_sglang.server import Refused
from corerl_testing import append, continued

STOP, LEFT = 7, 8
PROMPT = [1, 2, 3]


READER = Reader(engine="engine-0", experts=Experts(layers=2, choosing=[1], chosen=2))


def answer(tokens: list[int], reason: str, *, expert: int | None = 1, version: int = 3, read: int = 3) -> bytes:
    """Of a server that has drawn this for one row, `read` tokens of which stood there before."""
    told: dict[str, Any] = {"finish_reason": {"type": reason}, "weight_version": str(version)}
    if tokens:  # as SGLang 0.5.17 says it
        told["output_token_logprobs"] = [[-1.0, token, None] for token in tokens]
    if expert is not None:
        known = np.full((read + len(tokens) - 1, 2, 2), expert, np.int32)
        told["routed_experts"] = base64.b64encode(known.tobytes()).decode()
    return json.dumps([{"output_ids": tokens, "meta_info": told}]).encode()


def generation(said: bytes, request: GenerateRequest, version: int, *, paused: bool) -> Generation:
    return READER.generation(READER.samples(said), request, version, cut=[0] if paused else [])


def request_of(prompt: list[int]) -> GenerateRequest:
    params = SamplingParams(max_tokens=LEFT, stop_tokens=(STOP,), routed_experts=True)
    return GenerateRequest(
        tokens=np.array(prompt), offsets=np.array([0, len(prompt)]), noise_keys=np.array([5]), params=params
    )


def test_a_server_must_say_which_prompt_it_has_read() -> None:
    reader = Reader(engine="engine-0", experts=Experts(layers=0, choosing=[], chosen=0), pictures="vision")
    picture = Picture(np.zeros((8, 16, 3), np.uint8))
    text = evolve(request_of([1, 7, 5, 5, 8]), params=SamplingParams(max_tokens=LEFT, stop_tokens=(STOP,)))
    request = evolve(text, picture=np.array([0, 0, 1, 1, 0]), pictures=(picture,))
    own = json.loads(answer([4, STOP], "stop", expert=None))

    def read(request: GenerateRequest, tokens: list[int] | None, *, sampled: bool = True) -> list[int]:
        told = {"prompt_token_ids": tokens, **({} if sampled else {"output_ids": []})}
        info = own[0]["meta_info"] if sampled else json.loads(answer([], "abort", expert=None))[0]["meta_info"]
        told = json.dumps([{**own[0], **told, "meta_info": info}]).encode()
        cut = () if sampled else [0]
        return reader.generation(reader.samples(told), request, 3, cut=cut).tokens.tolist()

    assert read(request, [1, 7, 5, 5, 8]) == read(text, None) == [4, STOP]
    assert read(request, None, sampled=False) == []  # a pause has cut it before it was read
    with pytest.raises(EngineFailed, match="does not report the tokens of prompts with pictures; use SGLang 0.5.17"):
        read(request, None)
    for tokens, at in (([1, 7, 5, 5, 5, 8], 4), ([1, 7, 5, 5], 4), ([1, 1, 7, 5, 5, 8], 1)):
        message = rf"reads {len(tokens)} tokens in the row of noise key 5, wanted 5; they differ from token {at} on"
        with pytest.raises(EngineFailed, match=rf"{message}.*It expands {picture} otherwise than \[pictures.vision\]"):
            read(request, tokens)


def test_tokens_of_a_cut_row_keep_their_experts() -> None:
    request = request_of(PROMPT)
    cut = generation(answer([4, 5, 6], "abort"), request, 3, paused=True)
    assert (cut.unfinished.tolist(), cut.truncated.tolist()) == ([True], [False])
    rest = continued(request, cut)
    more = generation(answer([4, STOP], "stop", expert=2, version=4, read=6), rest, 4, paused=False)
    whole = append(request, cut, more)
    assert whole.versions.tolist() == [3, 3, 3, 4, 4]
    # Nothing was known of the cut part's last token, nor is of the whole one's.
    assert whole.routed_experts is not None
    assert whole.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 1, 1, 2, 2, -1]


@pytest.mark.parametrize("drawn", [[4, 5, STOP], [4, 5, 6, 4, 5, 6, 4, 5]])
def test_a_row_cut_at_its_end_is_finished(drawn: list[int]) -> None:
    ended = generation(answer(drawn, "abort"), request_of(PROMPT), 3, paused=True)
    assert ended.unfinished.tolist() == [False]
    assert ended.routed_experts is not None
    assert ended.routed_experts[:, 0, 0].tolist() == [1] * (2 + len(drawn)) + [-1]
    with pytest.raises(EngineFailed, match="did not report which experts"):
        generation(answer(drawn, "abort", expert=None), request_of(PROMPT), 3, paused=True)


@pytest.mark.parametrize(("drawn", "expert"), [([], 1), ([4], None)])
def test_a_row_cut_in_its_prompt_has_no_experts(drawn: list[int], expert: int | None) -> None:
    cut = generation(answer(drawn, "abort", expert=expert), request_of(PROMPT), 3, paused=True)
    assert cut.unfinished.tolist() == [True]
    assert cut.routed_experts is not None and (cut.routed_experts == -1).all()


def event(row: int, tokens: list[int], total: int, reason: str | None = None) -> bytes:
    """A part of a row, which has `total` tokens by then."""
    info = {"finish_reason": reason and {"type": reason}, "weight_version": "3", "completion_tokens": total}
    info["output_token_logprobs"] = [[-float(token), token, None] for token in tokens]
    return json.dumps({"index": row, "output_ids": tokens, "meta_info": info}).encode()


def test_samples_are_put_together_of_their_parts() -> None:
    parts = Parts("engine-0", 2)
    taken = [
        parts.take(event(1, [4], 1)),
        parts.take(event(0, [5, 6], 2, "stop")),
        parts.take(event(1, [5, 6], 3)),
        parts.take(event(1, [6], 3, "abort")),  # sent twice
    ]
    assert taken == [(1, [4], True), (0, [5, 6], False), (1, [5, 6], True), (1, [], False)]
    ended, cut = parts.samples()
    assert (ended.output_ids, cut.output_ids) == ([5, 6], [4, 5, 6])
    assert [token.logprob for token in cut.meta_info.output_token_logprobs] == [-4.0, -5.0, -6.0]
    assert (ended.meta_info.finish_reason, cut.meta_info.finish_reason) == ({"type": "stop"}, {"type": "abort"})


def test_a_row_aborted_in_the_queue_is_told_apart() -> None:
    """Its adapters are never unloaded: SGLang counts it as running for good."""
    cut = answer([4], "abort")
    (queued,) = READER.samples(cut.replace(b'"abort"', b'"abort", "message": "Abort in waiting queue"'))
    (running,) = READER.samples(cut)
    assert waited(queued) and not waited(running)


def test_an_answer_that_ends_before_its_rows_is_an_error() -> None:
    parts = Parts("engine-0", 2)
    parts.take(event(0, [5], 1, "stop"))
    parts.take(event(1, [4], 1))
    with pytest.raises(EngineFailed, match="engine-0: its server's answer ends before row 1 of 2 has ended"):
        parts.samples()
    with pytest.raises(Refused, match="engine-0: its server refused /generate: too long"):
        parts.take(b'{"error": {"message": "too long", "code": 400}}')
    with pytest.raises(EngineFailed, match="engine-0: cannot read its server's answer to /generate"):
        parts.take(b'{"index": 0, "output_ids"')
    with pytest.raises(EngineFailed, match="engine-0: cannot read its server's answer to /generate: Expected `array`"):
        READER.samples(b'{"output_ids": [1]}')


WHOLE = answer([4, 5, STOP], "stop")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (answer([4, 5, 6], "abort"), r"ended a sample after 3 tokens: \{'type': 'abort'\}$"),
        (answer([4, 5, 6], "length"), "ended a sample after 3 of 8 tokens: its KV cache or context is full"),
        (answer([4, 5, STOP], "stop", version=4), "sampled from weights '4', wanted 3; something other than CoreRL"),
        (WHOLE.replace(b"[-1.0, 5,", b"[-1.0, 6,"), "returned log-probs of other tokens than it sampled"),
        # It would be trained on as NaN.
        (
            WHOLE.replace(b"[-1.0, 5,", b"[null, 5,"),
            r"log-prob for token 1 of 3 in row 0 of 1 \(noise key 5",
        ),
    ],
    ids=["aborted", "no room", "other weights", "other tokens", "not finite"],
)
def test_an_answer_that_does_not_fit_is_an_error(said: bytes, message: str) -> None:
    with pytest.raises(EngineFailed, match=f"engine-0: its server .*{message}"):
        generation(said, request_of(PROMPT), 3, paused=False)


def test_a_server_that_scores_too_few_tokens_is_an_error() -> None:
    asked = request_of(PROMPT)
    asked = evolve(asked, params=evolve(asked.params, scored=2, scored_top=1))
    said = answer([4, STOP], "stop").replace(b'{"finish', b'{"input_token_logprobs": [[null, 2, null]], "finish')
    with pytest.raises(EngineFailed, match="log-probs of 0 tokens of a prompt of 3, and 0 of likely ones, wanted 2"):
        generation(said, asked, 3, paused=False)
    cut = generation(answer([], "abort", expert=None), asked, 3, paused=True)
    assert cut.scores is not None and np.isnan(cut.scores.logprobs).all()
