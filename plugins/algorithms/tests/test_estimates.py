"""The references are papers' sums token by token, and Python's own statistics."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest

from corerl.types import FloatArray, SampleBatch, offsets_of
from corerl_algorithms.estimates import gae, whiten


def random_batch(rng: np.random.Generator) -> SampleBatch:
    """Samples of 0 to 12 tokens with prompts, answers of an environment in between, and some without a loss token."""
    masks = [*(rng.random(rng.integers(0, 13)) < 0.5 for _ in range(40)), np.zeros(4, np.bool_), np.ones(3, np.bool_)]
    mask = np.concatenate(masks)
    return SampleBatch(
        tokens=np.zeros(len(mask), np.int64),
        offsets=offsets_of([len(each) for each in masks]),
        columns={"loss_mask": mask},
    )


def random_numbers(rng: np.random.Generator, batch: SampleBatch) -> FloatArray:
    """[N] standard normal at loss tokens."""
    numbers = rng.standard_normal(len(batch.tokens)).astype(np.float32)
    return np.where(batch.columns["loss_mask"], numbers, np.float32(np.nan))


def loss_tokens_of(batch: SampleBatch) -> list[list[int]]:
    """Of each sample, where its loss tokens are."""
    mask = batch.columns["loss_mask"]
    return [[n for n in range(start, end) if mask[n]] for start, end in itertools.pairwise(batch.offsets.tolist())]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.7), (1.0, 0.5)])
def test_gae_is_the_papers_sum_of_discounted_residuals(gamma: float, lam: float) -> None:
    rng = np.random.default_rng(2)
    batch = random_batch(rng)
    rewards, values = random_numbers(rng, batch), random_numbers(rng, batch)
    expected = np.zeros((2, len(batch.tokens)))
    for tokens in loss_tokens_of(batch):
        r, v = rewards[tokens].tolist(), [*values[tokens].tolist(), 0.0]
        for t, token in enumerate(tokens):
            advantage = sum((gamma * lam) ** (s - t) * (r[s] + gamma * v[s + 1] - v[s]) for s in range(t, len(tokens)))
            expected[:, token] = advantage, advantage + v[t]
    got = gae(rewards, values, batch, gamma=gamma, lam=lam)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_whitened_advantages_have_mean_0_and_deviation_1() -> None:
    rng = np.random.default_rng(4)
    batch = random_batch(rng)
    advantages, mask = 3.0 + 5.0 * random_numbers(rng, batch), batch.columns["loss_mask"]
    got = whiten(advantages, mask)
    chosen = got[mask].tolist()
    assert statistics.mean(chosen) == pytest.approx(0.0, abs=1e-6)
    assert statistics.pstdev(chosen) == pytest.approx(1.0, rel=1e-6)
    assert np.argsort(chosen).tolist() == np.argsort(advantages[mask]).tolist()
    assert not got[~mask].any()


def test_advantages_equal_within_rounding_are_whitened_to_0() -> None:
    advantages = np.array([1000.0, np.nextafter(np.float32(1000), np.float32(0))], np.float32)
    assert advantages[0] != advantages[1]
    assert whiten(advantages, np.ones(2, np.bool_)).tolist() == [0.0, 0.0]
