"""The references multiply ratios of probabilities token by token; the examples are worked by hand."""

import itertools
import math
from typing import Literal

import numpy as np
import pytest
import torch

from corerl.algorithms.corrections import correction_metrics, importance_weights
from corerl.types import FloatArray, SampleBatch
from corerl_transformers.engine import keep_likeliest

Level = Literal["token", "sequence", "geometric"]
Beyond = Literal["truncate", "mask"]

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


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_bounds_that_nothing_reaches_mask_nothing(level: Level) -> None:
    batch, trainer, engine = random_batch(np.random.default_rng(4))
    truncated, masked = (
        importance_weights(trainer, engine, batch, level=level, cap=math.inf, beyond=beyond)
        for beyond in ("truncate", "mask")
    )
    np.testing.assert_array_equal(truncated.weights, masked.weights)
    assert not truncated.outside.any() and not masked.outside.any()


def test_the_engines_weighted_mean_is_the_trainers_mean() -> None:
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
    weights = importance_weights(old, rollout, batch, level="sequence", cap=1e6).weights[::2]
    corrected = sum(engine[a] * engine[b] * w * worth[a, b] for (a, b), w in zip(pairs, weights, strict=True))
    assert corrected == pytest.approx(trainer @ worth @ trainer, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_log_ratios_beyond_all_measure_give_the_bounds_or_zero(level: Level) -> None:
    batch = SampleBatch(
        tokens=np.zeros(2, dtype=np.int64), offsets=np.array([0, 1, 2]), columns={"loss_mask": np.ones(2, np.bool_)}
    )
    far, near = np.array([-1, -2000], dtype=np.float32), np.array([-2000, -1], dtype=np.float32)

    def weights(cap: float, floor: float = 0.0, beyond: Beyond = "truncate") -> list[float]:
        found = importance_weights(far, near, batch, level=level, floor=floor, cap=cap, beyond=beyond)
        return [float(weight) for weight in found.weights]

    assert weights(2.0) == [2.0, 0.0]
    assert weights(2.0, floor=0.5) == [2.0, 0.5]
    assert weights(2.0, beyond="mask") == [0.0, 0.0]
    assert weights(math.inf) == [pytest.approx(math.exp(20)), 0.0]


def test_where_everything_is_masked_all_metrics_are_finite() -> None:
    found = importance_weights(logs(TRAINER), logs(ENGINE), BATCH, level="token", floor=2.5, cap=3.0, beyond="mask")
    assert not found.weights.any()
    assert correction_metrics(found, BATCH, beyond="mask") == {
        "weight": 0.0,
        "masked": 1.0,
        "masked_samples": 1.0,
        "effective": 0.0,
        "effective_samples": 0.0,
    }


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


# A first token, then a second: the policy, and what top_p = 0.7 samples from it.
#   first        .5   .3   .2      kept .8: 5/8, 3/8
#   second of 0  .6   .3   .1      kept .9: 2/3, 1/3
#   second of 1  .4   .35  .25     kept .75: 8/15, 7/15
POLICY = [[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.4, 0.35, 0.25]]
PAIRS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_what_top_p_leaves_out_biases_the_gradient() -> None:
    # The reward is 1 if the first token is 0: the second makes no difference.
    logits = torch.tensor(POLICY, dtype=torch.float64).log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    kept = keep_likeliest(logprobs, 0.7, 0).isfinite()
    assert kept.tolist() == [[True, True, False]] * 3
    sampled = logprobs.masked_fill(~kept, -math.inf).log_softmax(-1)

    def of_pairs(table: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.stack([table[0, a], table[1 + a, b]]) for a, b in PAIRS])

    probabilities = of_pairs(sampled.detach()).sum(1).exp()
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    expected = float(probabilities @ rewards)
    assert expected == pytest.approx(5 / 8)

    # Of the expected reward of what is sampled; the set of tokens that are kept is fixed.
    (wanted,) = torch.autograd.grad((of_pairs(sampled).sum(1).exp() * rewards).sum(), logits, retain_graph=True)
    first = torch.tensor([15 / 64, -15 / 64, 0.0], dtype=torch.float64)
    none = torch.zeros(3, dtype=torch.float64)
    torch.testing.assert_close(wanted, torch.stack([first, none, none]))

    # Of the loss: log-probs are of all tokens in engine and trainer, so that every ratio is 1.
    batch = SampleBatch(
        tokens=np.array(PAIRS).reshape(-1),
        offsets=np.arange(0, 9, 2),
        columns={"loss_mask": np.ones(8, dtype=np.bool_)},
    )
    recorded = of_pairs(logprobs.detach()).numpy().astype(np.float32).reshape(-1)
    assert importance_weights(recorded, recorded, batch, level="token", cap=2.0).weights.tolist() == [1.0] * 8
    gain = (probabilities * (rewards - expected))[:, None] * of_pairs(logprobs)
    (got,) = torch.autograd.grad(gain.sum(), logits)
    # Nothing is off at the first token, where advantages have a mean of 0. Then tokens that are kept gain probability
    # as one, advantage * grad log(.9), where the sample is better than the mean, and lose it where it is worse.
    share = 5 / 8 * 3 / 8  # the probability that 0 comes first, times its advantage; that of 1 is the opposite
    after_0 = share * torch.tensor([0.6 / 0.9 - 0.6, 0.3 / 0.9 - 0.3, -0.1], dtype=torch.float64)
    after_1 = -share * torch.tensor([0.4 / 0.75 - 0.4, 0.35 / 0.75 - 0.35, -0.25], dtype=torch.float64)
    torch.testing.assert_close(got, torch.stack([first, after_0, after_1]))
    assert float((got - wanted).norm() / wanted.norm()) == pytest.approx(0.2339, abs=1e-4)

    # Had the engine recorded what it samples from, each ratio would be the probability of what is kept.
    renormalized = of_pairs(sampled.detach()).numpy().astype(np.float32).reshape(-1)
    weights = importance_weights(recorded, renormalized, batch, level="token", cap=2.0).weights
    np.testing.assert_allclose(weights, [0.8, 0.9, 0.8, 0.9, 0.8, 0.75, 0.8, 0.75], rtol=1e-6)
