"""Two groups worked out by hand."""

import numpy as np
import pytest

from corerl.algorithms.dr_grpo import SPEC, Options
from corerl.algorithms.grpo import GRPO
from corerl.algorithms.losses import clipped
from corerl.config.schema import AlgorithmConfig
from corerl.data.plan import plan_steps
from corerl.types import ParallelLayout, SampleBatch
from tests.algorithms.ragged import Sample, step_of

MAX_TOKENS = 8


def test_two_groups_of_ragged_samples_worked_by_hand() -> None:
    # group  reward   A     ratios          min(r A, clip(r, 0.8, 1.2) A)
    #   0      1     1/2    2, 1, 1/2       0.6 (clipped), 0.5, 0.25
    #   0      0    -1/2    1/2, 1          -0.4 (clipped), -0.5
    #   1      3      1     1               1
    #   1      1     -1     2               -2
    ratios = [[2, 1, 0.5], [0.5, 1], [1], [2]]
    batch = SampleBatch(
        tokens=np.zeros(11, dtype=np.int64),
        offsets=np.array([0, 4, 7, 9, 11]),
        columns={"loss_mask": np.array([0, 1, 1, 1, 0, 1, 1, 0, 1, 0, 1], dtype=np.bool_)},
        rows={"group": np.array([0, 0, 1, 1])},
    )
    settled = AlgorithmConfig().settled(SPEC.defaults, max_tokens=MAX_TOKENS)
    algorithm = GRPO(Options())
    found = algorithm.advantages(batch, np.array([1, 0, 3, 1], np.float32), np.zeros(11, np.float32)).advantages
    assert found.tolist() == [0, 0.5, 0.5, 0.5, 0, -0.5, -0.5, 0, 1, 0, -1]

    layout = ParallelLayout.data_parallel(rank=0, world_size=1)
    (plan,) = plan_steps(
        batch,
        layout,
        tokens_per_micro_batch=100,
        mini_batches=1,
        epochs=1,
        aggregation=settled.aggregation,
        max_tokens=MAX_TOKENS,
        seed=0,
    )
    samples = [
        Sample(ratios=each, advantages=[found[end - 1]] * len(each), weight=weight)
        for each, end, weight in zip(ratios, batch.offsets[1:], plan.scales.tolist(), strict=True)
    ]
    (objective,) = algorithm.objectives().values()
    step = step_of(clipped, samples, **objective.loss.params)
    w = 1 / (4 * MAX_TOKENS)  # of every token, whatever the length of its sample
    assert step.loss == pytest.approx(-w * (0.6 + 0.5 + 0.25 - 0.4 - 0.5 + 1 - 2))
    assert step.gradients == [
        pytest.approx([0, -0.5 * w, -0.25 * w]),
        pytest.approx([0, 0.5 * w]),
        pytest.approx([-w]),
        pytest.approx([2 * w]),
    ]
