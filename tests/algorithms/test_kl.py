"""The reference is the exact divergence of two small distributions, by summing over the whole vocabulary."""

import math

import numpy as np
import pytest
import torch

from corerl.algorithms.kl import estimator, token_kl
from corerl.errors import ConfigError


def two_distributions() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 11, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), reference


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(name: str) -> None:
    policy, reference = (logits.log_softmax(0) for logits in two_distributions())
    exact = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum")
    assert (policy.exp() * estimator(name)(policy, reference)).sum().item() == pytest.approx(exact.item(), rel=1e-12)


def test_an_unknown_estimator_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown estimator 'k4'; use one of k1, k2, k3"):
        estimator("k4")


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_divergences_on_the_driver_are_the_formulas_of_the_paper(name: str) -> None:
    rng = np.random.default_rng(0)
    policy, reference = -rng.exponential(size=(2, 200)).astype(np.float32)
    mask = rng.random(200) < 0.5
    for array in (policy, reference):
        array[~mask] = np.nan
        array.flags.writeable = False  # as they come out of shared memory
    expected = []
    for p, q, is_loss_token in zip(policy.tolist(), reference.tolist(), mask.tolist(), strict=True):
        r = math.exp(q - p) if is_loss_token else 1.0
        expected.append({"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}[name])
    found = token_kl(policy, reference, mask, estimator=name)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
