"""What rollouts.jsonl holds of a sample: its texts, and of each of its rows the tokens with their numbers.

A line is an object: `step`, `kind` and what samples.jsonl has, then

    number     its place among the step's samples
    tokens     how many the policy chose, over all rows
    truncated  whether the limit on tokens cut it off, in any row
    ended      whether its last token is one that the policy chose and that ends answers; absent if nobody knows
    masked     true if it is left out of training: nothing is known of its tokens but their texts
    versions   [oldest, newest] of the weights that chose its tokens
    engines    the numbers of the engines that sampled them, ascending
    diff       mean and largest |trainer - engine| of its tokens' log-probs; absent where the trainer recomputes none
    advantage  the mean of its tokens' advantages
    shaped     its reward after penalties, which advantages are computed from
    peers      [how many, mean, standard deviation] of the `shaped` of the samples that it is compared with, itself too
    role       who it is of an episode of several
    rows       one for each conversation

What a step has not, such as advantages where it does not train, is absent. A row has `pieces`, the text of each token;
`spans`, [first, end) of each run of tokens that the policy chose; for these tokens in order `engine`, `trainer` and
`advantages`, and `versions` and `engines` as [count, number] runs; `shared`, how many of its tokens begin the row
before too; `rewards`, [token, reward] where a turn has one; `final` and `truncated`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from corerl.types import ROLE, TURN_REWARDS, Array, BoolArray, FloatArray, IntArray, SampleBatch

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
                # Behind itself: some tokenizers leave out the space that a text begins with.
                self._known[token] = self._decode([token, token])[len(self._decode([token])) :]
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


def credit_of(batch: SampleBatch) -> list[dict[str, Any]]:
    """What each sample of a step that trains has earned, and those that it is compared with: `shaped` and `peers`."""
    if "shaped_rewards" not in batch.row_columns:
        return [{} for _ in batch.episodes[0]]
    samples, _ = batch.episodes
    shaped = batch.row_columns["shaped_rewards"][samples].astype(np.float64)
    _, of, count = np.unique(batch.peers[samples], return_inverse=True, return_counts=True)
    mean = np.bincount(of, weights=shaped) / count
    std = np.sqrt(np.bincount(of, weights=(shaped - mean[of]) ** 2) / np.maximum(count - 1, 1))
    facts = zip(shaped.tolist(), count[of].tolist(), mean[of].tolist(), std[of].tolist(), strict=True)
    return [{"shaped": _number(own), "peers": [n, _number(of_all), _number(apart)]} for own, n, of_all, apart in facts]


def tokens_record(
    batch: SampleBatch, rows: IntArray, pieces: Pieces, *, recomputed: bool, ends: Collection[int]
) -> dict[str, Any]:
    """What a line says of a sample's tokens. `recomputed`: the column old_logprobs is the trainer's."""
    parts = [_row(batch, row, pieces, recomputed=recomputed) for row in rows.tolist()]
    bounds = [slice(batch.offsets[row], batch.offsets[row + 1]) for row in rows.tolist()]
    for part, before, after in zip(parts[1:], bounds, bounds[1:], strict=False):
        part["shared"] = _shared(batch.tokens[before], batch.tokens[after])
    mask = np.concatenate([batch.columns["loss_mask"][each] for each in bounds])

    def of(name: str) -> Array:
        return np.concatenate([batch.columns[name][each] for each in bounds])[mask]

    versions, trained = of("versions"), bool(mask.any())
    sampled = sum(end - first for part in parts for first, end in part["spans"])
    record: dict[str, Any] = {
        "tokens": sampled,
        "truncated": any(part["truncated"] for part in parts),
        "versions": [int(versions.min()), int(versions.max())] if trained else [],
    }
    if sampled and not trained:
        record["masked"] = True
    if ROLE in batch.row_columns:
        record["role"] = str(batch.row_columns[ROLE][rows[0]])
    if trained and "engines" in batch.columns:
        record["engines"] = np.unique(of("engines")).tolist()
    if ends:
        spans, length = parts[-1]["spans"], len(parts[-1]["pieces"])
        record["ended"] = bool(spans) and spans[-1][1] == length and int(batch.tokens[bounds[-1].stop - 1]) in ends
    if recomputed and trained:
        sizes = np.abs(of("old_logprobs") - of("rollout_logprobs"))
        record["diff"] = [_number(sizes.mean()), _number(sizes.max())]
    if trained and "advantages" in batch.columns:
        record["advantage"] = _number(of("advantages").mean(dtype=np.float64))
    return {**record, "rows": parts}


def _row(batch: SampleBatch, row: int, pieces: Pieces, *, recomputed: bool) -> dict[str, Any]:
    place = slice(batch.offsets[row], batch.offsets[row + 1])
    columns = {name: column[place] for name, column in batch.columns.items() if column.ndim == 1}
    mask = columns["loss_mask"]
    record: dict[str, Any] = {
        "pieces": pieces.of(batch.tokens[place]),
        "spans": runs(mask) or _left_out(batch, row),
        "engine": _numbers(columns["rollout_logprobs"][mask]),
        "versions": _counted(columns["versions"][mask]),
        "truncated": bool(batch.row_columns["truncated"][row]) if "truncated" in batch.row_columns else False,
        "final": bool(batch.row_columns["final"][row]) if "final" in batch.row_columns else True,
        "shared": 0,
    }
    if "engines" in columns:
        record["engines"] = _counted(columns["engines"][mask])
    if recomputed:
        record["trainer"] = _numbers(columns["old_logprobs"][mask])
    if "advantages" in columns:
        record["advantages"] = _numbers(columns["advantages"][mask])
    if TURN_REWARDS in columns:
        at = np.flatnonzero(columns[TURN_REWARDS])
        record["rewards"] = [[token, _number(columns[TURN_REWARDS][token])] for token in at.tolist()]
    return record


def _left_out(batch: SampleBatch, row: int) -> list[list[int]]:
    """[[first, end)] of a response that no loss token is left of, as of one that was cut off with
    `algorithm.overlong = "mask"`; of several turns with what is between them. Empty if nothing was sampled."""
    if not batch.row_columns.get("response_length", np.zeros(len(batch)))[row]:
        return []
    return [[int(batch.row_columns["prompt_length"][row]), int(batch.lengths[row])]]


def _counted(numbers: IntArray) -> list[list[int]]:
    return [[len(list(same)), number] for number, same in groupby(numbers.tolist())]


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
