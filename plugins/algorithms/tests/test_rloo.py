"""The references are means of the other samples of a group, in plain Python."""

import statistics

import numpy as np

from corerl_algorithms.rloo import left_one_out


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
