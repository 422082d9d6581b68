"""The references multiply ratios of probabilities token by token; the examples are worked by hand."""

import itertools
import math
from typing import Literal

import numpy as np
import pytest

from corerl.algorithms.corrections import correction_metrics, importance_weights
from corerl.types import FloatArray, SampleBatch
from tests.marked import marked

Level = Literal["token", "sequence", "geometric"]
Beyond = Literal["truncate", "mask"]

# sample              0               1          2
# token           0   1    2    3     4     5    6
# p_trainer           .4   .3         .2    .1
# p_engine            .2   .4         .1    .05
# ratio               2    3/4        2     2
TRAINER = [1, 0.4, 0.3, 1, 0.2, 0.1, 1]
ENGINE = [1, 0.2, 0.4, 1, 0.1, 0.05, 1]
BATCH = marked(".xx.", "xx", ".")


def logs(probabilities: list[float]) -> FloatArray:
    return np.log(probabilities).astype(np.float32)


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


@pytest.mark.parametrize("beyond", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_are_products_and_means_of_ratios_of_probabilities(level: Level, beyond: Beyond) -> None:
    batch, trainer, engine = random_batch(np.random.default_rng(0))
    floor, cap = (0.95, 1.05) if level == "geometric" else (0.9, 1.2)
    expected, outside = np.zeros(len(batch.tokens)), np.zeros(len(batch.tokens), dtype=np.bool_)
    for start, end in itertools.pairwise(batch.offsets.tolist()):
        tokens = [n for n in range(start, end) if batch.columns["loss_mask"][n]]
        ratios = {n: math.exp(trainer[n]) / math.exp(engine[n]) for n in tokens}
        for n in tokens:
            ratio = ratios[n] if level == "token" else math.prod(ratios.values())
            if level == "geometric":
                ratio **= 1 / len(tokens)
            outside[n] = not floor <= ratio <= cap
            expected[n] = ratio
            if outside[n]:
                expected[n] = 0.0 if beyond == "mask" else floor if ratio < floor else cap
    found = importance_weights(trainer, engine, batch, level=level, floor=floor, cap=cap, beyond=beyond)
    assert 0 < outside.sum() < batch.columns["loss_mask"].sum()
    assert found.outside.tolist() == outside.tolist()
    np.testing.assert_allclose(found.weights, expected, rtol=1e-6)


@pytest.mark.parametrize("beyond", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_where_trainer_and_engine_agree_every_weight_is_exactly_one(level: Level, beyond: Beyond) -> None:
    batch, trainer, _ = random_batch(np.random.default_rng(1))
    found = importance_weights(trainer, trainer, batch, level=level, floor=1.0, cap=1.0, beyond=beyond)
    assert found.weights.tolist() == batch.columns["loss_mask"].astype(float).tolist()
    assert not found.outside.any()


@pytest.mark.parametrize(("beyond", "name"), [("truncate", "truncated"), ("mask", "masked")])
def test_metrics_of_random_samples_are_those_of_a_loop(beyond: Beyond, name: str) -> None:
    batch, trainer, engine = random_batch(np.random.default_rng(3))
    found = importance_weights(trainer, engine, batch, level="token", floor=0.8, cap=1.4, beyond=beyond)
    samples = [
        [
            (float(found.weights[n]), not 0.8 <= math.exp(float(trainer[n]) - float(engine[n])) <= 1.4)
            for n in range(start, end)
            if batch.columns["loss_mask"][n]
        ]
        for start, end in itertools.pairwise(batch.offsets.tolist())
    ]
    samples = [sample for sample in samples if sample]
    tokens = [weight for weight, _ in itertools.chain(*samples)]
    means = [sum(weight for weight, _ in sample) / len(sample) for sample in samples]
    assert correction_metrics(found, batch, beyond=beyond) == pytest.approx(
        {
            "weight": sum(tokens) / len(tokens),
            name: sum(outside for _, outside in itertools.chain(*samples)) / len(tokens),
            f"{name}_samples": sum(any(outside for _, outside in sample) for sample in samples) / len(samples),
            "effective": sum(tokens) ** 2 / sum(w * w for w in tokens) / len(tokens),
            "effective_samples": sum(means) ** 2 / sum(w * w for w in means) / len(means),
        }
    )


def test_a_batch_without_loss_tokens_has_no_metrics() -> None:
    batch = BATCH.with_columns(loss_mask=np.zeros(7, dtype=np.bool_))
    found = importance_weights(logs(TRAINER), logs(ENGINE), batch, level="geometric", cap=2.0)
    assert not found.weights.any() and correction_metrics(found, batch, beyond="mask") == {}
