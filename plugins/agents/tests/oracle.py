"""Episodes against engines that say what a function of noise and position says."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attrs import evolve
from transformers import PreTrainedTokenizerBase

from corerl.data import Prompt
from corerl.engines import GenerateRequest, Generation, SamplingParams
from corerl.models import load_tokenizer
from corerl.ops import hash_key
from corerl.rollout import Failure, PromptSampler, Rollout, in_thread
from corerl_testing import Generate
from tests.rollout.samplers import prompt_sampler

TOKENIZER = load_tokenizer(tokenizer="characters:0123456789>s", path="")  # <eos> 2, 0 = 4 ... 9 = 13, > = 14
PARAMS = SamplingParams(max_tokens=12, stop_tokens=(2,))
PROMPTS = [Prompt(index=40, text="21>", answer="12"), Prompt(index=8, text="5>", answer="5", fields={"tool": "77>"})]


class Oracle:
    """A row's next token is a function of its noise and of how many came before: seldom the end."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    def __call__(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        rows, stops = [], request.params.stop_tokens
        for key, length, left in zip(request.noise_keys, request.response_lengths, request.left, strict=True):
            row: list[int] = []
            while len(row) < left and not (row and row[-1] in stops):
                draw = hash_key(int(key), int(length) + len(row)) % 14
                row.append(draw if draw > 3 else 2)
            rows.append(row)
        tokens = np.concatenate([np.array(row) for row in rows])
        return Generation(
            tokens=tokens,
            offsets=np.cumsum([0, *map(len, rows)]),
            logprobs=-tokens.astype(np.float32),
            versions=np.full(len(tokens), 3),
            truncated=np.array([row[-1] not in stops for row in rows]),
        )


def oracle_says(key: int, *, length: int = 0, limit: int = 12) -> list[int]:
    """The answer of at most `limit` tokens to a row of this noise, whose response has `length` tokens so far."""
    request = GenerateRequest(
        tokens=np.zeros(0, np.int64),
        offsets=np.zeros(2, np.int64),
        noise_keys=np.array([key]),
        params=evolve(PARAMS, max_tokens=limit),
        response_lengths=np.array([length]),
    )
    return Oracle()(request).tokens.tolist()


def with_experts(request: GenerateRequest) -> Generation:
    """The expert of a token is its place in the row; its own last one is unknown."""
    drawn = Oracle()(request)
    lengths = np.diff(request.offsets) + np.diff(drawn.offsets)
    experts = np.concatenate([[*range(length - 1), -1] for length in lengths]).astype(np.int16)
    return evolve(drawn, routed_experts=experts.reshape(-1, 1, 1))


def engines(draw: Callable[[GenerateRequest], Generation]) -> Generate:
    """Engines that answer any number of calls at once, each in a thread."""

    async def generate(request: GenerateRequest, **_: Any) -> Generation:
        return await in_thread(functools.partial(draw, request), name="engine")

    return generate


def plain_sampler(tokenizer: PreTrainedTokenizerBase = TOKENIZER) -> PromptSampler:
    """One of single responses, with the noise of the episodes that are played here."""
    return prompt_sampler(tokenizer=tokenizer, generate=engines(Oracle()), seed=7)


def played_plainly(prompts: Sequence[Prompt] = PROMPTS, tokenizer: PreTrainedTokenizerBase = TOKENIZER) -> Rollout:
    """The same as single responses, four of each prompt."""
    return asyncio.run(plain_sampler(tokenizer).sample(prompts, rollout_step=5, samples=4, params=PARAMS))


def noise_keys() -> list[int]:
    """Of the episodes that are played here, four of each prompt."""
    request = plain_sampler().request(PROMPTS, rollout_step=5, samples=4, params=PARAMS)
    return [int(key) for key in request.noise_keys]


Play = Callable[..., Rollout]
Fails = Callable[..., Failure]


def parts_of(rollout: Rollout) -> list[list[tuple[list[int], bool]]]:
    """The stretches of tokens of each row, and whether they are trained on."""
    batch, found = rollout.batch, []
    for low, high in itertools.pairwise(batch.offsets.tolist()):
        mask = batch.columns["loss_mask"][low:high]
        cuts = np.flatnonzero(np.diff(mask)) + 1
        stretches = zip(np.split(batch.tokens[low:high], cuts), np.split(mask, cuts), strict=True)
        found.append([(tokens.tolist(), bool(own[0])) for tokens, own in stretches])
    return found


def assert_equal(one: Rollout, other: Rollout, *, but: Sequence[str] = ()) -> None:
    np.testing.assert_array_equal(one.batch.tokens, other.batch.tokens)
    np.testing.assert_array_equal(one.batch.offsets, other.batch.offsets)
    for name, column in other.batch.columns.items():
        np.testing.assert_array_equal(one.batch.columns[name], column, err_msg=name)
    for name, row in other.batch.row_columns.items():
        if name not in but:
            np.testing.assert_array_equal(one.batch.row_columns[name], row, err_msg=name)
    assert one.texts == other.texts
