"""What rollouts.jsonl holds of a sample: its texts, and of each of its rows the tokens with their numbers.

A line is an object: `step`, `kind` and what samples.jsonl has, then

    number     its place among the step's samples
    tokens     how many the policy chose, over all rows
    truncated  whether the limit on tokens cut it off, in any row
    ended      whether its last token is one that the policy chose and that ends answers; absent if nobody knows
    versions   [oldest, newest] of the weights that chose its tokens
    diff       mean and largest |trainer - engine| of its tokens' log-probs; absent where the trainer recomputes none
    rows       one for each conversation

A row has `pieces`, the text of each token; `spans`, [first, end) of each run of tokens that the policy chose; for these
tokens in order `engine`, `trainer` (or absent) and `advantages`, and `versions` as [count, version] runs; `shared`, how
many of its tokens begin the row before too; `rewards`, [token, reward] where a turn has one; `final` and `truncated`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from corerl.types import TURN_REWARDS, BoolArray, FloatArray, IntArray, SampleBatch

PARTIAL = "\ufffd"  # what a tokenizer makes of a part of a character
LONGEST = 8  # tokens of one character, at most


class Pieces:
    """The text of each token of a row. A character of several tokens is the text of its last one."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def of(self, tokens: IntArray) -> list[str]:
        found, held = [], list[int]()
        for token in tokens.tolist():
            if token not in self._known:
                self._known[token] = self._decode([token])
            piece = self._known[token]
            if PARTIAL in piece or held:
                held.append(token)
                whole = self._decode(held)
                if whole.endswith(PARTIAL) and len(held) < LONGEST:
                    found.append("")
                    continue
                piece, held = whole, []
            found.append(piece)
        return found


def chosen(count: int, wanted: int) -> list[int]:
    """`wanted` of `count` samples, spread evenly, the first and the last among them; all if `wanted` is 0."""
    if not wanted or wanted >= count:
        return list(range(count))
    return sorted({round(at) for at in np.linspace(0, count - 1, wanted).tolist()})


def rows_by_sample(batch: SampleBatch) -> list[IntArray]:
    """The rows of each sample, in order."""
    _, episode_of = batch.episodes
    order = np.argsort(episode_of, kind="stable")
    return np.split(order, np.cumsum(np.bincount(episode_of))[:-1]) if len(batch) else []


def tokens_record(
    batch: SampleBatch, rows: IntArray, pieces: Pieces, *, recomputed: bool, ends: Collection[int]
) -> dict[str, Any]:
    """What a line says of a sample's tokens. `recomputed`: the column old_logprobs is the trainer's."""
    parts = [_row(batch, row, pieces, recomputed=recomputed) for row in rows.tolist()]
    bounds = [slice(batch.offsets[row], batch.offsets[row + 1]) for row in rows.tolist()]
    for part, before, after in zip(parts[1:], bounds, bounds[1:], strict=False):
        part["shared"] = _shared(batch.tokens[before], batch.tokens[after])
    mask = np.concatenate([batch.columns["loss_mask"][each] for each in bounds])
    versions = np.concatenate([batch.columns["versions"][each] for each in bounds])[mask]
    record: dict[str, Any] = {
        "tokens": int(mask.sum()),
        "truncated": any(part["truncated"] for part in parts),
        "versions": [int(versions.min()), int(versions.max())] if len(versions) else [],
    }
    if ends:
        last = int(batch.offsets[rows[-1] + 1]) - 1
        record["ended"] = bool(batch.columns["loss_mask"][last]) and int(batch.tokens[last]) in ends
    if recomputed and mask.any():
        sizes = np.abs(np.concatenate([_difference(batch, each) for each in bounds]))
        record["diff"] = [_number(sizes.mean()), _number(sizes.max())]
    return {**record, "rows": parts}


def _row(batch: SampleBatch, row: int, pieces: Pieces, *, recomputed: bool) -> dict[str, Any]:
    place = slice(batch.offsets[row], batch.offsets[row + 1])
    columns = {name: column[place] for name, column in batch.columns.items() if column.ndim == 1}
    mask = columns["loss_mask"]
    record: dict[str, Any] = {
        "pieces": pieces.of(batch.tokens[place]),
        "spans": runs(mask),
        "engine": _numbers(columns["rollout_logprobs"][mask]),
        "versions": [[len(list(same)), int(version)] for version, same in groupby(columns["versions"][mask].tolist())],
        "truncated": bool(batch.row_columns["truncated"][row]) if "truncated" in batch.row_columns else False,
        "final": bool(batch.row_columns["final"][row]) if "final" in batch.row_columns else True,
        "shared": 0,
    }
    if recomputed:
        record["trainer"] = _numbers(columns["old_logprobs"][mask])
    if "advantages" in columns:
        record["advantages"] = _numbers(columns["advantages"][mask])
    if TURN_REWARDS in columns:
        at = np.flatnonzero(columns[TURN_REWARDS])
        record["rewards"] = [[token, _number(columns[TURN_REWARDS][token])] for token in at.tolist()]
    return record


def _difference(batch: SampleBatch, place: slice) -> FloatArray:
    """[n] trainer - engine of the row's loss tokens."""
    mask = batch.columns["loss_mask"][place]
    found: FloatArray = batch.columns["old_logprobs"][place][mask] - batch.columns["rollout_logprobs"][place][mask]
    return found


def runs(mask: BoolArray) -> list[list[int]]:
    """[first, end) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2).tolist()


def _shared(one: IntArray, other: IntArray) -> int:
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _numbers(values: FloatArray) -> list[float | None]:
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    """Six digits are more than a page shows; JSON has neither NaN nor infinity."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
