from __future__ import annotations

import math

import numpy as np
import pytest
from attrs import evolve

from corerl.data.prompts import Prompt
from corerl.driver.metrics import recomputed_mismatch, rollout_metrics, staleness_metrics, train_metrics
from corerl.rollout.sampler import Rollout
from corerl.rollout.scored import ScoredRollout
from corerl.rollout.source import Policies
from corerl.types import Metric, Reduction, SampleBatch, TrainResult
from tests.marked import marked


def samples(**columns: list[float]) -> SampleBatch:
    """Two samples, of two prompt tokens each and of 1 and 3 response tokens."""
    rows = {"group": [0, 1], "response_length": [1, 3], "truncated": [False, True]}
    return marked("..x", "..xxx", of_rows=rows, **columns)


def scored(exact_match: float | None) -> ScoredRollout:
    prompt = Prompt(index=0, text="a", answer="b")
    rollout = Rollout(batch=samples(), prompts=(prompt, prompt), texts=["b", "bbb"])
    rewards = np.array([1.0, 0.5], np.float32)
    return ScoredRollout(step=0, rollout=rollout, rewards=rewards, exact_match=exact_match, seconds={})


def test_rollout_metrics_are_means_over_samples() -> None:
    assert rollout_metrics(scored(0.5)) == {
        "rollout/reward": 0.75,
        "rollout/reward_std": 0.25,
        "rollout/response_length": 2.0,
        "rollout/truncated": 0.5,
        "rollout/tokens": 4.0,
        "rollout/exact_match": 0.5,
    }
    assert "rollout/exact_match" not in rollout_metrics(scored(None))


def test_groups_without_spread_are_counted_among_compared_ones() -> None:
    given = scored(None)
    assert "rollout/groups_without_spread" not in rollout_metrics(given)  # groups of one
    of_four = evolve(
        given,
        rollout=evolve(given.rollout, batch=SampleBatch.concatenate([samples(), samples()])),
        rewards=np.array([1.0, 0.5, 0.5, 0.5], np.float32),
    )
    for groups, share in (([0, 0, 1, 1], 0.5), ([0, 0, 0, 5], 0.5), ([2, 1, 1, 1], 1.0), ([0, 0, 0, 0], 0.0)):
        batch = of_four.rollout.batch.with_row_columns(group=np.array(groups))
        found = rollout_metrics(evolve(of_four, rollout=evolve(of_four.rollout, batch=batch)))
        assert found["rollout/groups_without_spread"] == share


def test_parts_are_means_over_samples_that_have_them() -> None:
    parts = {"right": (1.0, 4), "failed": (-1.5, 2)}
    metrics = rollout_metrics(evolve(scored(None), parts=parts, failures={"timeout": 3}))
    assert (metrics["reward/right"], metrics["reward/failed"], metrics["rollout/failed"]) == (0.25, -0.75, 3.0)


def test_an_episode_counts_once_however_many_rows_it_has() -> None:
    given = scored(None)
    batch = given.rollout.batch.take_rows(np.array([0, 0, 1])).with_row_columns(
        episode=np.array([0, 0, 1]),
        turns=np.array([2, 1, 1]),
        truncated=np.array([False, True, True]),
        span=np.array([1, 1, 3]),
    )
    three = evolve(given, rollout=evolve(given.rollout, batch=batch), rewards=np.array([1.0, 1.0, 0.5], np.float32))
    metrics = rollout_metrics(three)
    told = {name: metrics[f"rollout/{name}"] for name in ("reward", "reward_std", "truncated", "turns", "rows")}
    assert told == {"reward": 0.75, "reward_std": 0.25, "truncated": 1.0, "turns": 2.0, "rows": 1.5}
    assert metrics["rollout/response_length"] == pytest.approx((1 + 1 + 3) / 3)


def test_extremes_stay_extremes() -> None:
    parts = [
        {"peak": Metric(peak, 1.0, Reduction.MAX), "least": Metric(peak, 1.0, Reduction.MIN), "ratio": ratio}
        for peak, ratio in ((1.0, Metric(0.0, 0.0)), (9.0, Metric(6.0, 3.0)), (2.0, Metric(4.0, 1.0)))
    ]
    steps = [TrainResult(applied=True, metrics=part, grad_norm=1.0, tokens=1) for part in parts]
    found = train_metrics(steps, lr=0.01)
    assert (found["train/peak"], found["train/least"], found["train/ratio"]) == (9.0, 1.0, 3.0)
    assert math.isnan(train_metrics(steps[:1], lr=0.01)["train/ratio"])


def test_a_nan_of_one_optimizer_step_is_that_of_the_whole_step() -> None:
    kinds = {"peak": Reduction.MAX, "least": Reduction.MIN, "ratio": Reduction.MEAN, "loss": Reduction.LOSS}
    for totals in ((1.0, math.nan), (math.nan, 1.0)):
        steps = [
            TrainResult(
                applied=True,
                metrics={name: Metric(total, 1.0, kind) for name, kind in kinds.items()},
                grad_norm=1.0,
                tokens=1,
            )
            for total in totals
        ]
        found = train_metrics(steps, lr=0.01)
        assert [name for name in kinds if not math.isnan(found[f"train/{name}"])] == []


def test_recomputed_logprobs_are_compared_at_response_tokens() -> None:
    batch = samples(
        old_logprobs=[9.0, 9.0, -1.0, 9.0, 9.0, -2.0, -3.0, -4.0],
        rollout_logprobs=[0.0, 0.0, -1.5, 0.0, 0.0, -2.0, -2.0, -4.5],
    )
    found = recomputed_mismatch(batch)
    apart = [0.5, 0.0, -1.0, 0.5]  # trainer less engine
    assert found == {
        "rollout/logprob_diff": pytest.approx((0.5 + 1.0 + 0.5) / 4),
        "rollout/logprob_diff_max": 1.0,
        "rollout/logprob_kl": pytest.approx(sum(math.exp(d) - 1 - d for d in apart) / 4),
        "rollout/logprob_diff_above_0.1": 0.75,
        "rollout/logprob_diff_above_1": 0.0,
    }


def test_staleness_counts_updates_since_each_loss_token() -> None:
    batch = samples()  # loss tokens: one of the first sample, three of the second
    versions = np.array([9, 9, 4, 9, 9, 2, 2, 5])
    assert staleness_metrics(batch.with_columns(versions=versions), Policies(version=5)) == {
        "rollout/staleness": (1 + 3 + 3 + 0) / 4,
        "rollout/staleness_max": 3.0,
        "rollout/staleness_fraction/0": 0.25,
        "rollout/staleness_fraction/1": 0.25,
        "rollout/staleness_fraction/3": 0.5,
        "rollout/continued": 0.5,
    }
    second = batch.with_columns(versions=versions, loss_mask=batch.columns["loss_mask"] & (batch.row_of == 1))
    assert staleness_metrics(second, Policies(version=5))["rollout/continued"] == 0.5  # the first has no version now
    none = batch.with_columns(versions=versions, loss_mask=np.zeros(8, np.bool_))
    assert staleness_metrics(none, Policies(version=5)) == {}


def test_rows_that_end_at_a_sampled_placeholder_are_counted() -> None:
    assert "rollout/placeholders" not in rollout_metrics(scored(None))
    for placeholder, share in ((7, 0.5), (2, 0.5), (3, 0.0), (99, 0.0)):  # 3 is in a prompt
        assert rollout_metrics(scored(None), placeholder=placeholder)["rollout/placeholders"] == share
