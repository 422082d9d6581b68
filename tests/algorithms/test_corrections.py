"""The references multiply ratios of probabilities token by token; the examples are worked by hand."""

import itertools
import math
from typing import Literal

import numpy as np
import pytest

from corerl.algorithms.corrections import correction_metrics, importance_weights
from corerl.types import FloatArray, SampleBatch

# sample              0               1          2
# token           0   1    2    3     4     5    6
# p_trainer           .4   .3         .2    .1
# p_engine            .2   .4         .1    .05
# ratio               2    3/4        2     2
MASK = [False, True, True, False, True, True, False]
TRAINER = [1, 0.4, 0.3, 1, 0.2, 0.1, 1]
ENGINE = [1, 0.2, 0.4, 1, 0.1, 0.05, 1]
BATCH = SampleBatch(
    tokens=np.zeros(7, dtype=np.int64), offsets=np.array([0, 4, 6, 7]), columns={"loss_mask": np.array(MASK)}
)


def logs(probabilities: list[float]) -> FloatArray:
    return np.log(probabilities).astype(np.float32)


@pytest.mark.parametrize(
    ("level", "cap", "expected"),
    [
        ("token", 3.0, [0, 2, 0.75, 0, 2, 2, 0]),
        ("token", 1.5, [0, 1.5, 0.75, 0, 1.5, 1.5, 0]),
        ("sequence", 5.0, [0, 1.5, 1.5, 0, 4, 4, 0]),
        ("sequence", 2.0, [0, 1.5, 1.5, 0, 2, 2, 0]),
    ],
)
def test_weights_of_two_samples_worked_by_hand(
    level: Literal["token", "sequence"], cap: float, expected: list[float]
) -> None:
    got = importance_weights(logs(TRAINER), logs(ENGINE), BATCH, level=level, cap=cap)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def random_batch(rng: np.random.Generator) -> tuple[SampleBatch, FloatArray, FloatArray]:
    """With log-probs of trainer and engine, NaN outside loss tokens; two samples have none."""
    lengths = np.concatenate([rng.integers(1, 30, size=50), [0, 4]])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = rng.random(offsets[-1]) < 0.7
    mask[offsets[-2] :] = False
    engine = np.where(mask, -rng.exponential(size=len(mask)), np.nan).astype(np.float32)
    trainer = (engine + 0.2 * rng.standard_normal(len(mask))).astype(np.float32)
    batch = SampleBatch(tokens=np.zeros(len(mask), dtype=np.int64), offsets=offsets, columns={"loss_mask": mask})
    return batch, trainer, engine


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_products_of_ratios_of_probabilities(level: Literal["token", "sequence"]) -> None:
    batch, trainer, engine = random_batch(np.random.default_rng(0))
    expected = np.zeros(len(batch.tokens))
    for start, end in itertools.pairwise(batch.offsets.tolist()):
        tokens = [n for n in range(start, end) if batch.columns["loss_mask"][n]]
        ratios = {n: math.exp(trainer[n]) / math.exp(engine[n]) for n in tokens}
        for n in tokens:
            expected[n] = min(ratios[n] if level == "token" else math.prod(ratios.values()), 1.2)
    got = importance_weights(trainer, engine, batch, level=level, cap=1.2)
    assert 0 < (got == np.float32(1.2)).sum() < len(got)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_where_trainer_and_engine_agree_every_weight_is_exactly_one(level: Literal["token", "sequence"]) -> None:
    batch, trainer, _ = random_batch(np.random.default_rng(1))
    got = importance_weights(trainer, trainer, batch, level=level, cap=2.0)
    assert got.tolist() == batch.columns["loss_mask"].astype(float).tolist()


def test_the_weighted_mean_under_the_engine_is_the_mean_under_the_trainer() -> None:
    # Exactly, by summing over all pairs of three tokens, each pair a sample that comes with its probability.
    rng = np.random.default_rng(2)
    trainer, engine = rng.dirichlet(np.ones(3), size=2)
    worth = rng.standard_normal((3, 3))
    pairs = list(itertools.product(range(3), repeat=2))
    batch = SampleBatch(
        tokens=np.array(pairs).reshape(-1),
        offsets=np.arange(0, 19, 2),
        columns={"loss_mask": np.ones(18, dtype=np.bool_)},
    )
    old, rollout = (np.log(p)[batch.tokens].astype(np.float32) for p in (trainer, engine))
    weights = importance_weights(old, rollout, batch, level="sequence", cap=1e6)[::2]
    corrected = sum(engine[a] * engine[b] * w * worth[a, b] for (a, b), w in zip(pairs, weights, strict=True))
    assert corrected == pytest.approx(trainer @ worth @ trainer, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_log_ratios_beyond_all_measure_give_the_cap_or_zero(level: Literal["token", "sequence"]) -> None:
    batch = SampleBatch(
        tokens=np.zeros(2, dtype=np.int64), offsets=np.array([0, 1, 2]), columns={"loss_mask": np.ones(2, np.bool_)}
    )
    far, near = np.array([-1, -2000], dtype=np.float32), np.array([-2000, -1], dtype=np.float32)
    assert importance_weights(far, near, batch, level=level, cap=2.0).tolist() == [2.0, 0.0]
    unbounded = importance_weights(far, near, batch, level=level, cap=math.inf)
    assert unbounded.tolist() == [pytest.approx(math.exp(20)), 0.0]


def test_metrics_of_two_samples_worked_by_hand() -> None:
    # loss tokens 2, 3/4, 2, 2; samples 11/8 and 2
    weights = importance_weights(logs(TRAINER), logs(ENGINE), BATCH, level="token", cap=2.0)
    metrics = correction_metrics(weights, BATCH, cap=2.0)
    assert metrics == pytest.approx(
        {
            "weight": 6.75 / 4,
            "truncated": 3 / 4,
            "truncated_samples": 1.0,
            "effective": 6.75**2 / (4 * (3 * 4 + 0.75**2)),
            "effective_samples": 3.375**2 / (2 * (1.375**2 + 4)),
        }
    )
    assert {type(value) for value in metrics.values()} == {float}


def test_metrics_of_random_samples_are_those_of_a_loop() -> None:
    batch, trainer, engine = random_batch(np.random.default_rng(3))
    weights = importance_weights(trainer, engine, batch, level="token", cap=1.4)
    samples = [
        [float(weights[n]) for n in range(start, end) if batch.columns["loss_mask"][n]]
        for start, end in itertools.pairwise(batch.offsets.tolist())
    ]
    samples = [sample for sample in samples if sample]
    tokens = list(itertools.chain(*samples))
    means = [sum(sample) / len(sample) for sample in samples]
    cap = float(np.float32(1.4))
    assert correction_metrics(weights, batch, cap=1.4) == pytest.approx(
        {
            "weight": sum(tokens) / len(tokens),
            "truncated": sum(w == cap for w in tokens) / len(tokens),
            "truncated_samples": sum(max(sample) == cap for sample in samples) / len(samples),
            "effective": sum(tokens) ** 2 / sum(w * w for w in tokens) / len(tokens),
            "effective_samples": sum(means) ** 2 / sum(w * w for w in means) / len(means),
        }
    )


def test_one_sample_that_outweighs_all_others_counts_as_one() -> None:
    batch = SampleBatch(
        tokens=np.zeros(8, dtype=np.int64), offsets=np.arange(0, 9, 2), columns={"loss_mask": np.ones(8, np.bool_)}
    )
    metrics = correction_metrics(np.array([0, 0, 3, 3, 0, 0, 0, 0], dtype=np.float32), batch, cap=5.0)
    assert (metrics["effective"], metrics["effective_samples"], metrics["truncated"]) == (0.25, 0.25, 0.0)
    assert correction_metrics(np.zeros(8, dtype=np.float32), batch, cap=5.0)["effective"] == 0.0


def test_a_batch_without_loss_tokens_has_no_metrics() -> None:
    batch = BATCH.with_columns(loss_mask=np.zeros(7, dtype=np.bool_))
    assert correction_metrics(np.zeros(7, dtype=np.float32), batch, cap=2.0) == {}
