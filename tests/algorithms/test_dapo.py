import math

import numpy as np
import pytest

from corerl.algorithms.dapo import SPEC, Options
from corerl.algorithms.grpo import GRPO
from corerl.algorithms.losses import clipped
from corerl.config.schema import AlgorithmConfig
from corerl.plugin.spec import ACTOR
from corerl.types import SampleBatch
from tests.algorithms.ragged import Sample, step_of


def test_it_is_grpo_with_the_papers_settings_and_those_of_the_config_win() -> None:
    assert SPEC.implementation == f"{GRPO.__module__}:{GRPO.__name__}"
    settled = AlgorithmConfig().settled(SPEC.defaults, max_tokens=20_480)
    assert (settled.aggregation, settled.dynamic_sampling, settled.overlong) == ("token-mean", 10, "penalty")
    assert settled.overlong_buffer == 4096  # as in section 4.1
    own = AlgorithmConfig(dynamic_sampling=0, overlong="keep").settled(SPEC.defaults, max_tokens=20_480)
    assert (own.dynamic_sampling, own.overlong, own.overlong_buffer) == (0, "keep", 0)


def test_two_groups_of_ragged_samples_worked_by_hand() -> None:
    # group   reward    A     ratios        min(r A, clip(r, 0.8, 1.28) A)
    #   0       1       1     1.25, 1.5     1.25, 1.28 (clipped)
    #   0       0      -1     3/4, 1        -0.8 (clipped), -1
    #   0      1/2      0     2             0
    #   1       3       h     1.5           1.28 h (clipped)      h = 1 / sqrt(2)
    #   1       1      -h     2             -2 h
    h, algorithm = 1 / math.sqrt(2), GRPO(Options())
    batch = SampleBatch(
        tokens=np.zeros(7, dtype=np.int64),
        offsets=np.array([0, 2, 4, 5, 6, 7]),
        columns={"loss_mask": np.ones(7, dtype=np.bool_)},
        rows={"group": np.array([0, 0, 0, 1, 1])},
    )
    rewards = np.array([1, 0, 0.5, 3, 1], np.float32)
    found = algorithm.advantages(batch, rewards, np.zeros(7, np.float32)).advantages
    assert found.tolist() == pytest.approx([1, 1, -1, -1, 0, h, -h], abs=1e-5)
    ratios, w = [[1.25, 1.5], [0.75, 1], [2], [1.5], [2]], 1 / 7  # a long sample counts by its tokens
    each = zip(ratios, (1.0, -1.0, 0.0, h, -h), strict=True)
    samples = [Sample(ratios=r, advantages=[a] * len(r), weight=w) for r, a in each]
    step = step_of(clipped, samples, **algorithm.objectives()[ACTOR].loss.params)
    assert step.loss == pytest.approx(-w * (1.25 + 1.28 - 0.8 - 1 + 1.28 * h - 2 * h))
    assert step.gradients == [
        pytest.approx([-1.25 * w, 0]),
        pytest.approx([0, w]),
        [0],
        [0],
        pytest.approx([2 * w * h]),
    ]


def test_a_token_may_become_likelier_by_more_than_it_may_become_rarer() -> None:
    params = GRPO(Options()).objectives()[ACTOR].loss.params
    assert params == {"clip_low": 0.2, "clip_high": 0.28}
    rising = Sample(ratios=[1.25, 1.3], advantages=[1, 1], weight=0.5)
    falling = Sample(ratios=[0.85, 0.75], advantages=[-1, -1], weight=0.5)
    step = step_of(clipped, [rising, falling], **params)
    assert step.gradients == [[-0.625, 0.0], [0.425, 0.0]]
