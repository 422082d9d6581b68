"""The reference is DAPO's equation case by case."""

import numpy as np
import pytest

from corerl.algorithms.advantages import soft_overlong_penalty, without_truncated
from corerl.types import SampleBatch


@pytest.mark.parametrize("buffer", [0, 1, 7, 50])
def test_the_penalty_is_the_papers_equation(buffer: int) -> None:
    expected = []
    for length in range(61):
        if length <= 50 - buffer:
            expected.append(0.0)
        elif length <= 50:
            expected.append(((50 - buffer) - length) / buffer)
        else:
            expected.append(-1.0)
    got = soft_overlong_penalty(np.arange(61), max_tokens=50, buffer=buffer)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_truncated_samples_lose_their_loss_tokens_alone() -> None:
    batch = SampleBatch(
        tokens=np.arange(1, 7),
        offsets=np.array([0, 2, 5, 6]),
        columns={
            "loss_mask": np.array([False, True, False, True, True, True]),
            "rollout_logprobs": np.array([0, -1, 0, -2, -3, -4], dtype=np.float32),
            "versions": np.array([0, 7, 0, 7, 8, 8]),
            "experts": np.array([1, 2, 3, 4, 5, 6]),
        },
        row_columns={"truncated": np.array([False, True, False]), "group": np.array([0, 0, 1])},
    )
    got = without_truncated(batch)
    assert {name: column.tolist() for name, column in got.columns.items()} == {
        "loss_mask": [False, True, False, False, False, True],
        "rollout_logprobs": [0.0, -1.0, 0.0, 0.0, 0.0, -4.0],
        "versions": [0, 7, 0, 0, 0, 8],
        "experts": [1, 2, 3, 4, 5, 6],
    }
    assert {name: got.columns[name].dtype for name in got.columns} == {
        name: column.dtype for name, column in batch.columns.items()
    }
    assert got.tokens is batch.tokens and got.row_columns == batch.row_columns and len(got) == 3
    assert batch.columns["loss_mask"].sum() == 4  # the batch that was given stays as it was


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "advantages", "values", "returns"])
def test_columns_computed_later_are_0_in_truncated_samples(name: str) -> None:
    batch = SampleBatch(
        tokens=np.arange(4),
        offsets=np.array([0, 1, 3, 4]),
        columns={name: np.array([1, 2, 3, 4], dtype=np.float32)},
        row_columns={"truncated": np.array([False, True, False])},
    )
    assert without_truncated(batch).columns[name].tolist() == [1.0, 0.0, 0.0, 4.0]
