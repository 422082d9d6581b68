"""Rows of tokens of which some stand for pictures, as a plain list of (token, picture's id or "") for each, and what
transformers says of tokens sampled after such rows."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.pictures import Picture
from corerl.types import PICTURE, Array, FloatArray, SampleBatch, all_shown, offsets_of

Row = list[tuple[int, str]]
PICTURES = {each.id: each for each in (Picture(np.full((2, 3, 3), shade, np.uint8)) for shade in range(5))}
PARAMS = SamplingParams(max_tokens=4, stop_tokens=(2,))


def random_rows(rng: np.random.Generator, count: int, *, most: int = 5) -> list[Row]:
    """Some with pictures, several times the same ones, or none; some without tokens."""
    names = list(PICTURES)
    rows = []
    for _ in range(count):
        row: Row = []
        for name in rng.choice(["", *names], size=rng.integers(0, 4)):
            row += [(int(token), str(name)) for token in rng.integers(10, 90, size=rng.integers(1, most))]
        rows.append(row)
    return rows


def _laid_out(rows: Sequence[Row]) -> tuple[Array, Array, Array, tuple[Picture, ...]]:
    """Tokens, offsets, the column `picture` and the pictures, each once."""
    parts = []
    for row in rows:
        names = list(dict.fromkeys(name for _, name in row if name))
        column = np.array([1 + names.index(name) if name else 0 for _, name in row], np.int32)
        parts.append((column, [PICTURES[name] for name in names]))
    column, pictures = all_shown([(np.zeros(0, np.int32), ()), *parts])
    tokens = np.array([token for row in rows for token, _ in row], np.int64)
    return tokens, offsets_of([len(row) for row in rows]), column, pictures


def batch_of(rows: Sequence[Row]) -> SampleBatch:
    """Without the column if no row shows a picture, as samplers make it."""
    tokens, offsets, column, pictures = _laid_out(rows)
    columns: dict[str, Array] = {"loss_mask": tokens % 2 == 0, "advantages": tokens.astype(np.float32)}
    return SampleBatch(
        tokens=tokens, offsets=offsets, columns=columns | ({PICTURE: column} if pictures else {}), pictures=pictures
    )


def request_of(rows: Sequence[Row]) -> GenerateRequest:
    tokens, offsets, column, pictures = _laid_out(rows)
    keys = np.arange(len(rows))
    return GenerateRequest(
        tokens=tokens, offsets=offsets, noise_keys=keys, params=PARAMS, picture=column, pictures=pictures
    )


def rows_in(found: SampleBatch | GenerateRequest) -> list[Row]:
    """What each row shows. Checks that each picture is there once and shown."""
    zeros = np.zeros(len(found.tokens), np.int32)
    column = found.columns.get(PICTURE, zeros) if isinstance(found, SampleBatch) else found.picture
    names = ["", *(picture.id for picture in found.pictures)]
    assert len(set(names)) == len(names) and set(column.tolist()) | {0} == set(range(len(names)))
    pairs = [(int(token), names[number]) for token, number in zip(found.tokens, column, strict=True)]
    return [pairs[begin:end] for begin, end in zip(found.offsets[:-1], found.offsets[1:], strict=True)]


@torch.no_grad()
def apart(model: Any, inputs: Any, request: GenerateRequest, generation: Generation) -> list[FloatArray]:
    """[R] how far the log-probs of each row's response are from those of the model's own forward of the row alone,
    whose pictures are prepared by `inputs`. A response has no token that stands for a picture but its last."""
    takes = inspect.signature(model.model.forward).parameters
    divisor, found = 1.0 if request.params.greedy else request.params.temperature, []
    bounds = zip(generation.offsets[:-1], generation.offsets[1:], strict=True)
    for prompt, column, (low, high) in zip(request.by_row(), request.picture_by_row(), bounds, strict=True):
        response = torch.tensor(generation.tokens[low:high])
        fed = torch.cat([torch.tensor(prompt), response[:-1]])[None]
        given: dict[str, Any] = {}
        if pictures := [request.pictures[number - 1] for number, _ in itertools.groupby(column) if number]:
            given = {name: torch.as_tensor(np.array(each)) for name, each in inputs.inputs(pictures).items()}
            kinds = torch.zeros_like(fed, dtype=torch.int32)
            kinds[0, : len(prompt)] = torch.tensor((column > 0) & (prompt == inputs.placeholder)).int()
            given |= {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in takes}
        logits = model(input_ids=fed, use_cache=False, **given).logits[0, len(prompt) - 1 :].float()
        wanted = torch.log_softmax(logits / divisor, dim=-1).gather(1, response[:, None])[:, 0]
        found.append(np.abs(wanted.numpy() - generation.logprobs[low:high]))
    return found
