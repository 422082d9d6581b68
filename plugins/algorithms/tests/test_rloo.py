"""The references are means of the other samples of a group, in plain Python."""

import statistics

import numpy as np

from corerl.algorithms import Clip
from corerl.types import SampleBatch
from corerl_algorithms.rloo import RLOO, left_one_out


def test_samples_are_compared_with_their_groups_others() -> None:
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 12, 60)
    rewards = rng.standard_normal(60)
    expected = []
    for i, group in enumerate(groups):
        others = [rewards[j] for j in range(60) if groups[j] == group and j != i]
        expected.append(rewards[i] - statistics.mean(others) if others else 0.0)
    assert len({int((groups == group).sum()) for group in groups}) > 3
    np.testing.assert_allclose(left_one_out(rewards, groups), expected, rtol=1e-5, atol=1e-7)


def test_equal_rewards_and_single_samples_teach_exactly_nothing() -> None:
    assert left_one_out(np.array([0.1, 0.1, 0.1, 3.0]), np.array([0, 0, 0, 1])).tolist() == [0.0] * 4


def test_penalties_of_tokens_count_as_their_samples() -> None:
    batch = SampleBatch(
        tokens=np.zeros(5, dtype=np.int64),
        offsets=np.array([0, 3, 5]),
        columns={"loss_mask": np.array([0, 1, 1, 0, 1], dtype=np.bool_)},
        row_columns={"group": np.array([7, 7])},
    )
    penalties = np.array([0, -0.5, -0.5, 0, 0], dtype=np.float32)
    found = RLOO(Clip()).advantages(batch, np.array([3, 0], dtype=np.float32), penalties).advantages
    assert (found.dtype, found.tolist()) == (np.float32, [0, 2, 2, 0, -2])
