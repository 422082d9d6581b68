"""The references are sums over the other samples of a group, in plain Python."""

import statistics

import numpy as np
import pytest

from corerl.algorithms.losses import clipped
from corerl.algorithms.rloo import RLOO, SPEC, Options, left_one_out
from corerl.plugin.spec import ACTOR
from corerl.types import LossSpec, SampleBatch
from tests.algorithms.ragged import Sample, step_of


def test_three_groups_of_ragged_samples_worked_by_hand() -> None:
    # group   reward   others' mean   advantage
    #   4      1          1/4            3/4
    #   4      0          3/4           -3/4
    #   4      1/2        1/2             0
    #   7      2           0              2
    #   7      0           2             -2
    #   5      3                          0      nothing to compare with
    batch = SampleBatch(
        tokens=np.zeros(10, dtype=np.int64),
        offsets=np.array([0, 2, 5, 6, 8, 9, 10]),
        columns={"loss_mask": np.array([0, 1, 0, 1, 1, 1, 1, 1, 1, 1], dtype=np.bool_)},
        rows={"group": np.array([4, 4, 4, 7, 7, 5])},
    )
    # The penalties of single tokens count as their sample's: 3 - 1/2 - 1/2 = 2.
    rewards = np.array([1, 0, 0.5, 3, 0, 3], dtype=np.float32)
    penalties = np.array([0, 0, 0, 0, 0, 0, -0.5, -0.5, 0, 0], dtype=np.float32)
    found = RLOO(Options()).advantages(batch, rewards, penalties)
    assert found.advantages.dtype == np.float32
    assert found.advantages.tolist() == [0, 0.75, 0, -0.75, -0.75, 0, 2, 2, -2, 0]

    # ratios        min(r A, clip(r, 0.8, 1.2) A)
    #   2             0.9 (clipped)
    #   1/2, 1       -0.6 (clipped), -0.75
    #   4             0
    #   1/2, 1.1      1, 2.2
    #   2            -4
    #   1             0
    ratios, each = [[2], [0.5, 1], [4], [0.5, 1.1], [2], [1]], [0.75, -0.75, 0, 2, -2, 0]
    samples = [Sample(ratios=r, advantages=[a] * len(r), weight=1 / 8) for r, a in zip(ratios, each, strict=True)]
    step = step_of(clipped, samples, **RLOO(Options()).objectives()[ACTOR].loss.params)
    assert step.loss == pytest.approx(-(0.9 - 0.6 - 0.75 + 1 + 2.2 - 4) / 8)
    assert step.gradients == [[0], pytest.approx([0, 0.75 / 8]), [0], pytest.approx([-1 / 8, -2.2 / 8]), [0.5], [0]]


def test_groups_of_any_size_are_compared_with_the_mean_of_the_others() -> None:
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 12, 60)
    rewards = rng.standard_normal(60)
    expected = []
    for i, group in enumerate(groups):
        others = [rewards[j] for j in range(60) if groups[j] == group and j != i]
        expected.append(rewards[i] - statistics.mean(others) if others else 0.0)
    assert len({int((groups == group).sum()) for group in groups}) > 3
    np.testing.assert_allclose(left_one_out(rewards, groups), expected, rtol=1e-5, atol=1e-7)


def test_a_group_of_equal_rewards_teaches_exactly_nothing() -> None:
    assert left_one_out(np.array([0.1, 0.1, 0.1]), np.zeros(3, dtype=np.int64)).tolist() == [0.0, 0.0, 0.0]


def test_a_run_uses_ppos_clip_with_its_own_bounds() -> None:
    assert SPEC.implementation == f"{RLOO.__module__}:{RLOO.__name__}"
    loss = RLOO(Options(clip_high=0.3)).objectives()[ACTOR].loss
    assert loss == LossSpec(name="clipped", params={"clip_low": 0.2, "clip_high": 0.3})
