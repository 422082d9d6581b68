"""Advantages worked out by hand; means and deviations are those of Python's statistics."""

import statistics
import tomllib

import numpy as np
import pytest

from corerl.algorithms.losses import clipped
from corerl.algorithms.reinforce_plus_plus import (
    BASELINE_SPEC,
    SPEC,
    Options,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
)
from corerl.config.load import config_of, dump_toml
from corerl.config.schema import AlgorithmConfig, RolloutConfig, TrainConfig
from corerl.plan.resolve import resolve_tables
from corerl.plugin.spec import ACTOR, AlgorithmRun
from corerl.types import LossSpec, SampleBatch
from tests.algorithms.ragged import Sample, step_of

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


def test_returns_of_tokens_are_normalized_over_the_batch() -> None:
    # reward    penalties     what is earned from each token on
    #   1       -1, -1/2          -1/2, 1/2
    #   4        0                 4
    #   0       -2                -2
    #   2       -1, 0, -1          0, 1, 1
    expected = whitened([-0.5, 0.5, 4, -2, 0, 1, 1])
    found = ReinforcePlusPlus(Options()).advantages(BATCH, REWARDS, PENALTIES).advantages
    mask = BATCH.columns["loss_mask"]
    assert found.dtype == np.float32
    assert found[mask].tolist() == pytest.approx(expected, rel=1e-5)
    assert not found[~mask].any()


def test_a_samples_tokens_have_its_reward_if_single_tokens_are_not_penalized() -> None:
    found = ReinforcePlusPlus(Options()).advantages(BATCH, REWARDS, np.zeros(10, np.float32)).advantages
    expected = whitened([1, 1, 4, 0, 2, 2, 2])
    assert found[BATCH.columns["loss_mask"]].tolist() == pytest.approx(expected, rel=1e-5)


def test_with_a_baseline_rewards_less_their_groups_mean_are_normalized_over_the_batch() -> None:
    # reward and penalties   less the group's mean      tokens
    #   1 - 3/2 = -1/2            -9/4                    2
    #   4 - 0   =  4               9/4                    1
    #   0 - 2   = -2              -1                      1
    #   2 - 2   =  0               1                      3
    expected = whitened([-2.25, -2.25, 2.25, -1, 1, 1, 1])
    found = ReinforcePlusPlusBaseline(Options()).advantages(BATCH, REWARDS, PENALTIES).advantages
    mask = BATCH.columns["loss_mask"]
    assert found[mask].tolist() == pytest.approx(expected, rel=1e-5)
    assert not found[~mask].any()


@pytest.mark.parametrize("algorithm", [ReinforcePlusPlus, ReinforcePlusPlusBaseline])
def test_a_step_on_two_groups_worked_by_hand(algorithm: type[ReinforcePlusPlus]) -> None:
    found = algorithm(Options()).advantages(BATCH, REWARDS, PENALTIES).advantages
    a = found[BATCH.columns["loss_mask"]].tolist()
    # In both, the samples' advantages have the signs - -, +, -, and the last token's is above 0.
    # ratios       min(r A, clip(r, 0.8, 1.2) A)
    #   2, 1         2 A, A
    #   1/2          A / 2
    #   1/2          0.8 A (clipped)
    #   1, 1.1, 2    A, 1.1 A, 1.2 A (clipped)
    assert [number > 0 for number in (*a[:4], a[6])] == [False, False, True, False, True]
    ratios, parts = [[2, 1], [0.5], [0.5], [1, 1.1, 2]], iter(a)
    samples = [Sample(ratios=each, advantages=[next(parts) for _ in each], weight=1 / 7) for each in ratios]
    step = step_of(clipped, samples, **algorithm(Options()).objectives()[ACTOR].loss.params)
    assert step.loss == pytest.approx(-(2 * a[0] + a[1] + a[2] / 2 + 0.8 * a[3] + a[4] + 1.1 * a[5] + 1.2 * a[6]) / 7)
    assert step.gradients == [
        pytest.approx([-2 * a[0] / 7, -a[1] / 7]),
        pytest.approx([-a[2] / 14]),
        [0],
        pytest.approx([-a[4] / 7, -1.1 * a[5] / 7, 0]),
    ]


def test_rewards_that_are_all_equal_teach_exactly_nothing() -> None:
    for algorithm in (ReinforcePlusPlus(Options()), ReinforcePlusPlusBaseline(Options())):
        found = algorithm.advantages(BATCH, np.full(4, 0.1, np.float32), np.zeros(10, np.float32))
        assert not found.advantages.any()


def test_both_variants_clip_and_the_one_with_a_baseline_wants_two_samples_of_a_prompt() -> None:
    for spec, algorithm in ((SPEC, ReinforcePlusPlus), (BASELINE_SPEC, ReinforcePlusPlusBaseline)):
        assert spec.implementation == f"{algorithm.__module__}:{algorithm.__name__}"
        loss = algorithm(Options(clip_low=0.1)).objectives()[ACTOR].loss
        assert loss == LossSpec(name="clipped", params={"clip_low": 0.1, "clip_high": 0.2})
    for samples, wanted in ((1, [".rollout.samples"]), (2, [])):
        run = AlgorithmRun(
            algorithm=AlgorithmConfig(), rollout=RolloutConfig(samples=samples), train=TrainConfig(), steps=1
        )
        assert [problem.path for problem in BASELINE_SPEC.check(Options(), run)] == wanted
        assert not list(SPEC.check(Options(), run))


@pytest.mark.parametrize("name", ["reinforce++", "reinforce++-baseline"])
def test_its_name_is_a_key_in_files_and_overrides(name: str) -> None:
    overrides = ["backend.name=plain", f"algorithm.name={name}", f'algorithms."{name}".clip_low=0.125']
    config = config_of({}, overrides)
    assert resolve_tables(config).algorithms[name] == Options(clip_low=0.125)
    assert config_of(tomllib.loads(dump_toml(config))) == config
