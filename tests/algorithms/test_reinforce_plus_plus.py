"""Advantages worked out by hand; means and deviations are those of Python's statistics."""

import statistics

import numpy as np
import pytest

from corerl.algorithms.reinforce_plus_plus import Options, ReinforcePlusPlus, ReinforcePlusPlusBaseline
from corerl.types import FloatArray, SampleBatch

# Two groups of two; x is a loss token. The last sample of the second group has an environment's token in between.
TOKENS = [".xx", "x", ".x", "x.xx"]
BATCH = SampleBatch(
    tokens=np.zeros(10, dtype=np.int64),
    offsets=np.array([0, 3, 4, 6, 10]),
    columns={"loss_mask": np.array([mark == "x" for mark in "".join(TOKENS)], dtype=np.bool_)},
    rows={"group": np.array([0, 0, 1, 1])},
)
REWARDS = np.array([1, 4, 0, 2], dtype=np.float32)
PENALTIES = np.array([0, -1, -0.5, 0, 0, -2, -1, 0, 0, -1], dtype=np.float32)


def whitened(numbers: list[float]) -> list[float]:
    mean, deviation = statistics.mean(numbers), statistics.pstdev(numbers)
    return [(each - mean) / deviation for each in numbers]


# reward    penalties     what is earned from each token on
#   1       -1, -1/2          -1/2, 1/2
#   4        0                 4
#   0       -2                -2
#   2       -1, 0, -1          0, 1, 1
EARNED = [-0.5, 0.5, 4, -2, 0, 1, 1]
# reward and penalties   less the group's mean      tokens
#   1 - 3/2 = -1/2            -9/4                    2
#   4 - 0   =  4               9/4                    1
#   0 - 2   = -2              -1                      1
#   2 - 2   =  0               1                      3
CENTRED = [-2.25, -2.25, 2.25, -1, 1, 1, 1]


@pytest.mark.parametrize(
    ("algorithm", "penalties", "before"),
    [
        (ReinforcePlusPlus, PENALTIES, EARNED),
        (ReinforcePlusPlus, 0 * PENALTIES, [1, 1, 4, 0, 2, 2, 2]),
        (ReinforcePlusPlusBaseline, PENALTIES, CENTRED),
    ],
)
def test_advantages_are_normalized_over_the_batch(
    algorithm: type[ReinforcePlusPlus], penalties: FloatArray, before: list[float]
) -> None:
    found, mask = algorithm(Options()).advantages(BATCH, REWARDS, penalties).advantages, BATCH.columns["loss_mask"]
    assert found.dtype == np.float32 and not found[~mask].any()
    assert found[mask].tolist() == pytest.approx(whitened(before), rel=1e-5)


def test_rewards_that_are_all_equal_teach_exactly_nothing() -> None:
    for algorithm in (ReinforcePlusPlus(Options()), ReinforcePlusPlusBaseline(Options())):
        found = algorithm.advantages(BATCH, np.full(4, 0.1, np.float32), np.zeros(10, np.float32))
        assert not found.advantages.any()
