"""Rollout batches from marks: a text for each row, in which x is a loss token and . is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from corerl.types import Array, SampleBatch, offsets_of


def marked(*rows: str, of_rows: Mapping[str, Sequence[Any]] | None = None, **columns: Sequence[Any]) -> SampleBatch:
    """Tokens count from 0. `columns` are of tokens, `of_rows` of rows; what has a fraction is float32."""
    mask = np.array([mark == "x" for mark in "".join(rows)], np.bool_)
    return SampleBatch(
        tokens=np.arange(len(mask)),
        offsets=offsets_of([len(row) for row in rows]),
        columns={"loss_mask": mask, **{name: _array(values) for name, values in columns.items()}},
        row_columns={name: np.array(values) for name, values in (of_rows or {}).items()},
    )


def _array(values: Sequence[Any]) -> Array:
    found = np.array(values)
    return found.astype(np.float32) if found.dtype == np.float64 else found
