"""The references are statistics.mean and statistics.stdev of Python, group by group."""

import statistics

import numpy as np
import pytest

from corerl.algorithms.advantages import STD_EPS, broadcast, group_advantages
from corerl.types import SampleBatch

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


def test_three_rewards_worked_by_hand() -> None:
    # 0, 1/2, 1: mean 1/2, variance (1/4 + 0 + 1/4) / 2 = 1/4, standard deviation 1/2.
    got = group_advantages(np.array([0, 0.5, 1], dtype=np.float32), np.zeros(3, dtype=np.int64), normalize_std=True)
    np.testing.assert_allclose(got, [-1.0, 0.0, 1.0], rtol=1e-5)


@pytest.mark.parametrize("normalize_std", [False, True])
def test_a_group_without_spread_and_a_group_of_one_have_advantages_of_exactly_zero(normalize_std: bool) -> None:
    rewards = np.array([0.1, 0.1, 0.1, 5.0], dtype=np.float64)  # the mean of three times 0.1 is not 0.1
    got = group_advantages(rewards, np.array([0, 0, 0, 1]), normalize_std=normalize_std)
    assert got.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_broadcast_writes_a_samples_number_at_its_loss_tokens_only() -> None:
    batch = SampleBatch(
        tokens=np.arange(6),
        offsets=np.array([0, 2, 6]),
        columns={"loss_mask": np.array([False, True, False, False, True, True])},
    )
    assert broadcast(np.array([-1.5, 2.0], dtype=np.float32), batch).tolist() == [0.0, -1.5, 0.0, 0.0, 2.0, 2.0]
