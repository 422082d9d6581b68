"""Samples of given lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import evolve

from corerl.types import SampleBatch, offsets_of
from corerl_testing import make_samples


def samples_of(lengths: Sequence[int], seed: int) -> SampleBatch:
    total, offsets = sum(lengths), offsets_of(np.array(lengths))
    long = make_samples(seed, samples=150 + total // 4)
    columns = {name: column[:total].copy() for name, column in long.columns.items()}
    columns["loss_mask"][offsets[:-1]] = False  # nothing predicts a first token
    for column in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns"):
        columns[column][~columns["loss_mask"]] = 0.0
    rows = {"group": np.zeros(len(lengths), dtype=np.int64)}
    return evolve(long, tokens=long.tokens[:total], offsets=offsets, columns=columns, row_columns=rows)
