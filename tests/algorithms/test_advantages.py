"""The references are Python's own: its statistics group by group."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from corerl.algorithms.advantages import STD_EPS, group_advantages, spread, without_truncated
from tests.marked import marked

REWARDS = np.array([1.0, 0.25, 0.0, 0.5, 0.75, 0.5], dtype=np.float32)
GROUPS = np.array([7, 3, 7, 3, 3, 7])


@pytest.mark.parametrize("normalize_std", [False, True])
def test_advantages_are_rewards_against_their_own_group(normalize_std: bool) -> None:
    expected = []
    for reward, group in zip(REWARDS.tolist(), GROUPS.tolist(), strict=True):
        peers = REWARDS[group == GROUPS].tolist()
        spread = statistics.stdev(peers) + STD_EPS if normalize_std else 1.0
        expected.append((reward - statistics.mean(peers)) / spread)
    got = group_advantages(REWARDS, GROUPS, normalize_std=normalize_std)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6)


# Equal but for rounding: sums of the same parts in another order, a float32 and the next one, parts that cancel.
ROUNDED = [[0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], [1000.0, float(np.nextafter(np.float32(1000), np.float32(0)))]]
ROUNDED += [[0.1 + 0.2 - 0.3, 0.0], [-5.0, -5.0 * (1 - 1e-7)]]


@pytest.mark.parametrize("rewards", ROUNDED)
def test_rewards_equal_within_rounding_teach_nothing(rewards: list[float]) -> None:
    assert rewards[0] != rewards[1]
    groups = np.array([0, 0, 1, 1])
    found = group_advantages(np.array([*rewards, 0.0, 1.0]), groups, normalize_std=True)
    assert found[:2].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(found[2:], [-(0.5**0.5), 0.5**0.5], rtol=1e-5)
    assert spread(np.array([*rewards, 0.0, 1.0]), groups).tolist() == [False, True]


def test_truncated_samples_lose_their_loss_tokens_alone() -> None:
    batch = marked(
        *(".x", ".xx", "x"),
        rollout_logprobs=[0.0, -1.0, 0.0, -2.0, -3.0, -4.0],
        versions=[0, 7, 0, 7, 8, 8],
        experts=[1, 2, 3, 4, 5, 6],
        of_rows={"truncated": [False, True, False], "group": [0, 0, 1]},
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
