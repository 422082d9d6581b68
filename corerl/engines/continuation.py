"""Continue interrupted responses: build the follow-up request and join the parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from attrs import evolve

from corerl.engines.base import GENERATION_ROWS, GENERATION_TOKENS, GenerateRequest, Generation, OnFinished, Watch
from corerl.types import Array, IntArray, offsets_of

# Tokens of each row that are sampled before they are looked at, and tokens of a response for one more of them.
PART = 64
GROWTH = 8


def continued(request: GenerateRequest, generation: Generation) -> GenerateRequest:
    """Request the rows that `generation` left unfinished, their responses so far appended to the prompts. Noise keys
    are kept: under the same weights, the same tokens follow as without the interruption."""
    rows = np.flatnonzero(generation.unfinished)
    prompts = request if len(rows) == len(request) else request.take_rows(rows)
    every = _split(generation.tokens, generation.offsets)
    sampled = [every[row] for row in rows]
    lengths = np.diff(generation.offsets)[rows]
    if prompts.params.scored and len(generation.tokens):  # the prompts were read before, as far as they were prompts
        prompts = evolve(prompts, params=evolve(prompts.params, scored=0))
    return evolve(
        prompts,
        tokens=_in_turns(prompts.tokens, prompts.offsets, sampled),
        offsets=prompts.offsets + offsets_of(lengths),
        response_lengths=prompts.response_lengths + lengths,
        answered=prompts.answered + lengths,
        picture=_in_turns(prompts.picture, prompts.offsets, [np.zeros(length, np.int32) for length in lengths]),
    )


def _in_turns(values: Array, offsets: IntArray, after: Sequence[Array]) -> Array:
    """The values of each row, with what comes after them."""
    return np.concatenate([values[:0], *itertools.chain(*zip(_split(values, offsets), after, strict=True))])


def append(request: GenerateRequest, generation: Generation, more: Generation) -> Generation:
    """Append `more`, the answer to `continued`, to the unfinished rows of `generation`, the answer to `request`.

    Each token keeps the log-prob, version and experts it was sampled with; experts unknown at that time, such as those
    of a part's last token, come from the pass that read the token. Scores of prompts are those of the first part that
    has tokens: if any of its rows was not read, the request has to be made again."""
    rows = np.flatnonzero(generation.unfinished)
    follows: dict[int, int] = {int(row): index for index, row in enumerate(rows)}

    def per_token(name: str) -> list[Array]:
        first, second = getattr(generation, name), getattr(more, name)
        before, after = _split(first, generation.offsets), _split(second, more.offsets)
        return [
            np.concatenate([part, after[follows[row]]]) if row in follows else part for row, part in enumerate(before)
        ]

    def per_row(name: str) -> Array:
        values: Array = getattr(generation, name).copy()
        values[rows] = getattr(more, name)
        return values

    columns = {name: per_token(name) for name in GENERATION_TOKENS}
    return Generation(
        offsets=offsets_of([len(row) for row in columns["tokens"]]),
        routed_experts=_experts(request, generation, more, follows),
        scores=generation.scores if len(generation.tokens) else more.scores,
        **{name: np.concatenate(each) for name, each in columns.items()},
        **{name: per_row(name) for name in GENERATION_ROWS},
    )


def in_parts(
    generate: Callable[[GenerateRequest], Generation], request: GenerateRequest, watch: Watch, on_finished: OnFinished
) -> Generation:
    """`Engine.generate_watched` by an engine that only generates: part by part, each of the rows that go on."""
    done, enough = Generation.nothing(request), np.zeros(len(request), np.bool_)
    while True:
        going = np.flatnonzero(done.unfinished)
        rest = continued(request, done)
        part = np.maximum(PART, rest.answered // GROWTH)
        asked = evolve(rest, limits=np.minimum(rest.limits, rest.response_lengths + part))
        generated = generate(asked)
        sizes = np.diff(generated.offsets)
        for row, tokens in zip(going.tolist(), _split(generated.tokens, generated.offsets), strict=True):
            enough[row] = watch(row, tokens.tolist())
        goes_on = generated.truncated & (sizes < rest.left)
        done = append(
            request,
            done,
            evolve(
                generated,
                truncated=generated.truncated & ~goes_on,
                unfinished=(generated.unfinished | goes_on) & ~enough[going],
            ),
        )
        on_finished(len(rest) - int(done.unfinished.sum()))
        if generated.unfinished.any() or not done.unfinished.any():  # the engine was paused, or has ended all
            return done


def split(generation: Generation, requests: list[GenerateRequest]) -> list[Generation]:
    """Split a generation of the concatenated `requests` into one for each."""
    parts, row, token, prompt = [], 0, 0, 0
    for request in requests:
        low, high = generation.offsets[row], generation.offsets[row + len(request)]
        routed, scores = generation.routed_experts, generation.scores
        count = len(request.tokens) + int(high - low)
        parts.append(
            Generation(
                offsets=generation.offsets[row : row + len(request) + 1] - low,
                routed_experts=None if routed is None else routed[token : token + count],
                scores=scores and scores.part(prompt, prompt + len(request.tokens)),
                **{name: getattr(generation, name)[low:high] for name in GENERATION_TOKENS},
                **{name: getattr(generation, name)[row : row + len(request)] for name in GENERATION_ROWS},
            )
        )
        row, token, prompt = row + len(request), token + count, prompt + len(request.tokens)
    return parts


def _experts(
    request: GenerateRequest, generation: Generation, more: Generation, follows: dict[int, int]
) -> Array | None:
    if generation.routed_experts is None and not len(generation.tokens):  # interrupted before any were reported
        unknown = more.routed_experts
        if unknown is None:
            return None
        generation = evolve(
            generation, routed_experts=np.full((len(request.tokens), *unknown.shape[1:]), -1, dtype=unknown.dtype)
        )
    if generation.routed_experts is None or (more.routed_experts is None and len(more.tokens)):
        return None
    if more.routed_experts is None:
        return generation.routed_experts
    before = _split(generation.routed_experts, request.offsets + generation.offsets)
    lengths = np.diff(request.offsets) + np.diff(generation.offsets)
    after = _split(more.routed_experts, offsets_of(lengths[list(follows)] + np.diff(more.offsets)))
    parts = []
    for row, part in enumerate(before):
        if row in follows:
            whole = after[follows[row]].copy()
            known = part >= 0
            whole[: len(part)][known] = part[known]
            part = whole
        parts.append(part)
    return np.concatenate(parts)


def _split(values: Array, offsets: IntArray) -> list[Array]:
    # As numpy's split, which takes ten times as long for a row.
    return [values[start:stop] for start, stop in itertools.pairwise(offsets.tolist())]
