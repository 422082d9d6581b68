"""Two groups worked out by hand."""

import math

import numpy as np
import pytest

from corerl.algorithms.grpo import GRPO, SPEC, Options
from corerl.algorithms.losses import clipped
from corerl.config.schema import AlgorithmConfig
from corerl.plugin.spec import ACTOR
from corerl.types import LossSpec, SampleBatch
from tests.algorithms.ragged import Sample, step_of


def test_two_groups_of_ragged_samples_worked_by_hand() -> None:
    # group   reward   mean   deviation    A    ratios          min(r A, clip(r, 0.8, 1.2) A)
    #   0       1       1/2      1/2       1    2, 1, 1/2       1.2 (clipped), 1, 0.5
    #   0       0                         -1    1/2, 1          -0.8 (clipped), -1
    #   0      1/2                         0    4               0
    #   1       3        2    sqrt(2)      h    1               h            h = 1 / sqrt(2)
    #   1       1                         -h    2               -2 h
    ratios = [[2, 1, 0.5], [0.5, 1], [4], [1], [2]]
    batch = SampleBatch(
        tokens=np.zeros(13, dtype=np.int64),
        offsets=np.array([0, 4, 7, 9, 11, 13]),
        columns={"loss_mask": np.array([0, 1, 1, 1, 0, 1, 1, 0, 1, 0, 1, 0, 1], dtype=np.bool_)},
        rows={"group": np.array([0, 0, 0, 1, 1])},
    )
    algorithm, rewards = GRPO(Options()), np.array([1, 0, 0.5, 3, 1], np.float32)
    found = algorithm.advantages(batch, rewards, np.zeros(13, np.float32)).advantages
    h = 1 / math.sqrt(2)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx([0, 1, 1, 1, 0, -1, -1, 0, 0, 0, h, 0, -h], abs=1e-5)

    w = 1 / 8  # of every token, as with "token-mean"
    each = [1.0, -1.0, 0.0, h, -h]
    samples = [Sample(ratios=r, advantages=[a] * len(r), weight=w) for r, a in zip(ratios, each, strict=True)]
    step = step_of(clipped, samples, **algorithm.objectives()[ACTOR].loss.params)
    assert step.loss == pytest.approx(-w * (1.2 + 1 + 0.5 - 0.8 - 1 + h - 2 * h))
    assert step.gradients == [
        pytest.approx([0, -w, -0.5 * w]),
        pytest.approx([0, w]),
        [0],
        pytest.approx([-w * h]),
        pytest.approx([2 * w * h]),
    ]
    assert step.metrics["clip_fraction"].value == 2 / 8


def test_a_run_weighs_tokens_alike_and_clips_by_its_own_bounds() -> None:
    assert SPEC.implementation == f"{GRPO.__module__}:{GRPO.__name__}"
    settled = AlgorithmConfig().settled(SPEC.defaults, max_tokens=8)
    assert (settled.aggregation, settled.old_logprobs, settled.dynamic_sampling) == ("token-mean", "rollout", 0)
    loss = GRPO(Options(clip_high=0.3)).objectives()[ACTOR].loss
    assert loss == LossSpec(name="clipped", params={"clip_low": 0.2, "clip_high": 0.3})
