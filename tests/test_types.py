from __future__ import annotations

import math

import numpy as np
import pytest

from corerl.errors import UserError
from corerl.types import AdamSettings, Metric, Reduction, SampleBatch, merge_metrics
from tests.pictured import batch_of, random_rows, rows_in


def batch(*lengths: int, start: int = 0) -> SampleBatch:
    """Tokens counted through, and what is to go with them."""
    total = sum(lengths)
    return SampleBatch(
        tokens=np.arange(start, start + total),
        offsets=np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]),
        columns={"tenth": np.arange(start, start + total) / 10},
        row_columns={"length": np.array(lengths)},
    )


def test_samples_are_taken_in_the_order_asked_for() -> None:
    taken = batch(2, 0, 3, 1).take_rows(np.array([2, 0, 1]))
    assert taken.tokens.tolist() == [2, 3, 4, 0, 1]
    assert taken.offsets.tolist() == [0, 3, 5, 5]
    assert taken.columns["tenth"] == pytest.approx(taken.tokens / 10)
    assert taken.row_columns["length"].tolist() == [3, 2, 0]
    assert len(batch(2, 1).take_rows(np.zeros(0, np.int64))) == 0
    runs = batch(2, 0, 3, 1).take_rows(
        np.array([3, 0, 1, 2, 2])
    )  # neighbors, one of them empty, and one that comes twice
    assert (runs.tokens.tolist(), runs.offsets.tolist()) == ([5, 0, 1, 2, 3, 4, 2, 3, 4], [0, 1, 3, 3, 6, 9])


@pytest.mark.parametrize(
    "targets", [np.zeros(3), np.zeros((3, 0), int), np.zeros((3, 2, 2), int), np.zeros(3, np.uint8)]
)
def test_targets_that_are_no_ids_of_each_token_are_refused(targets: np.ndarray) -> None:
    with pytest.raises(
        ValueError, match=rf"'targets' is {targets.dtype} .*, expected int32 or int64, \[N\] or \[N, K\]"
    ):
        batch(3).with_columns(targets=targets)


@pytest.mark.parametrize("reduction", Reduction)
def test_only_loss_metrics_are_scaled_with_gradients(
    reduction: Reduction,
) -> None:
    metric, other = Metric(6.0, 4.0, reduction), Metric(2.0, 12.0, reduction)
    total = {"loss": 0.25 * 6.0}.get(reduction.value, 6.0)
    assert metric.scaled(0.25) == Metric(total, 4.0, reduction)
    assert metric.scaled(1.0) == metric
    # Whether before or after parts are merged.
    merged = merge_metrics([{"m": metric}, {"m": other}])["m"]
    assert merged.scaled(0.25) == merge_metrics([{"m": metric.scaled(0.25)}, {"m": other.scaled(0.25)}])["m"]
    assert merged.value == {"mean": 8.0 / 16.0, "sum": 8.0, "loss": 8.0, "max": 6.0, "min": 2.0}[reduction.value]


@pytest.mark.parametrize("reduction", Reduction)
def test_a_nan_of_any_rank_is_that_of_all(reduction: Reduction) -> None:
    parts = [{"m": Metric(total, 1.0, reduction)} for total in (0.1, math.nan)]
    assert math.isnan(merge_metrics(parts)["m"].value)
    assert math.isnan(merge_metrics(reversed(parts))["m"].value)


@pytest.mark.parametrize("seed", range(20))
def test_batches_that_are_taken_and_joined_keep_their_pictures(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [random_rows(rng, count) for count in rng.integers(1, 6, size=3)]
    joined = SampleBatch.concatenate([batch_of(rows) for rows in parts])
    every = [row for rows in parts for row in rows]
    assert rows_in(joined) == every
    chosen = rng.integers(0, len(every), size=rng.integers(0, 2 * len(every)))
    assert rows_in(joined.take_rows(chosen)) == [every[row] for row in chosen]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"betas": (0.9, 1.0)}, "betas=(0.9, 1.0), expected two numbers, each at least 0 and below 1"),
        ({"betas": (0.9,)}, "betas=(0.9,), expected two numbers, each at least 0 and below 1"),
        ({"betas": 0.9}, "betas=0.9, expected two numbers, each at least 0 and below 1"),
        ({"betas": (0.9, float("nan"))}, "betas=(0.9, nan), expected two numbers, each at least 0 and below 1"),
        ({"eps": 0.0}, "eps=0.0, expected a finite number above 0"),
        ({"eps": "1e-8"}, "eps='1e-8', expected a finite number above 0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1, expected a finite number that is at least 0"),
        ({"clip_norm": float("inf")}, "clip_norm=inf, expected a finite number that is at least 0"),
    ],
)
def test_adam_settings_outside_their_range_are_refused(given: dict[str, object], wanted: str) -> None:
    with pytest.raises(UserError) as caught:
        AdamSettings(**given)  # type: ignore[arg-type]  # what is refused
    assert caught.value.message == f"AdamSettings: {wanted}; leave it out to keep the config's"
