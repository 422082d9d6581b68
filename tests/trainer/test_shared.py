"""What is put into the object store, and how often."""

from __future__ import annotations

import numpy as np
import pytest

from corerl.trainer import shared
from corerl.trainer.shared import share
from corerl.types import SampleBatch


def test_equal_rows_and_columns_are_put_once(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[SampleBatch] = []
    monkeypatch.setattr(shared, "put", lambda piece: put.append(piece) or len(put))
    batch = SampleBatch(
        tokens=np.arange(6),
        offsets=np.array([0, 1, 3, 6]),
        columns={"loss_mask": np.ones(6, np.bool_), "advantages": np.arange(6, dtype=np.float32)},
        rows={"group": np.array([7, 8, 9])},
        temperature=0.5,
    )
    both = share(batch)
    assert put == []  # nobody reads it yet
    columns = ("loss_mask", "advantages")
    found = [
        both.piece(None, columns),
        both.piece(np.array([0, 2]), columns),
        both.piece(np.array([0, 2]), ["loss_mask", "routed_experts"]),  # of which the batch has one
        both.piece(np.array([0, 2]), columns[::-1]),
        both.piece(None, batch.columns),
        both.piece(np.array([0, 1]), columns),
    ]
    assert found == [1, 2, 3, 2, 1, 4]
    whole, some, fewer, others = put
    assert [piece.tokens.tolist() for piece in put] == [[0, 1, 2, 3, 4, 5], [0, 3, 4, 5], [0, 3, 4, 5], [0, 1, 2]]
    assert [piece.rows["group"].tolist() for piece in put] == [[7, 8, 9], [7, 9], [7, 9], [7, 8]]
    assert whole.tokens is batch.tokens and all(piece.temperature == 0.5 for piece in put)
    assert (some.columns["advantages"].tolist(), some.offsets.tolist()) == ([0.0, 3.0, 4.0, 5.0], [0, 1, 4])
    assert (fewer.columns.keys(), others.columns.keys()) == ({"loss_mask"}, {"loss_mask", "advantages"})
