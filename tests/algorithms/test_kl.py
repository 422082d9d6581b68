"""The reference is the exact divergence of two small distributions, by summing over the whole vocabulary."""

import math

import pytest
import torch

from corerl.algorithms.kl import estimator, k1, k2, k3
from corerl.errors import ConfigError


def two_distributions() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 11, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), reference


def test_one_token_worked_by_hand() -> None:
    # p_policy = 1/2, p_reference = 1/4: d = -log 2
    policy, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert k1(policy, reference).item() == pytest.approx(math.log(2))
    assert k2(policy, reference).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(policy, reference).item() == pytest.approx(0.5 - 1 + math.log(2))


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(name: str) -> None:
    policy, reference = (logits.log_softmax(0) for logits in two_distributions())
    exact = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum")
    assert (policy.exp() * estimator(name)(policy, reference)).sum().item() == pytest.approx(exact.item(), rel=1e-12)


def test_the_expected_gradient_of_k2_is_that_of_the_divergence_and_the_one_of_k1_is_zero() -> None:
    logits, reference_logits = two_distributions()
    policy, reference = logits.log_softmax(0), reference_logits.log_softmax(0)
    probabilities = policy.exp().detach()  # a sampled token's probability has no gradient
    (of_k2,) = torch.autograd.grad((probabilities * k2(policy, reference)).sum(), logits, retain_graph=True)
    (of_k1,) = torch.autograd.grad((probabilities * k1(policy, reference)).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    torch.testing.assert_close(of_k2, exact)
    torch.testing.assert_close(of_k1, torch.zeros_like(of_k1))


def test_k3_stays_finite_where_the_reference_is_far_likelier_and_still_pulls_where_it_is_far_less() -> None:
    policy = torch.tensor([-100.0, -1.0], requires_grad=True)
    value = k3(policy, torch.tensor([-1.0, -100.0]))
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert (value >= 0).all()
    assert policy.grad is not None
    assert policy.grad[1].item() == pytest.approx(1.0)


def test_an_unknown_estimator_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown estimator 'k4'; take one of k1, k2, k3"):
        estimator("k4")
