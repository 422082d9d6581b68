"""Gradients in expectation over every sample, against those of the stated objectives in torch alone.

An optimizer step has two samples of one prompt. All tensors are [P, 2, MOST], P pairs of samples, as in `enumeration`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from corerl.plugin.registry import Kind, scan
from tests.algorithms.enumeration import FIXED, MOST, RANDOM, World, gradients

OURS = ("corerl", "corerl-algorithms")
ALGORITHMS = sorted(entry.name for entry in scan(Kind.ALGORITHMS) if entry.distribution in OURS)
AGGREGATIONS = ("token-mean", "sequence-mean", "constant-length")
EPS = 1e-6  # of a standard deviation
ENTROPY, KL, GAMMA, LAMBDA, EARNED = 0.3, 0.4, 0.9, 0.8, 0.7


# ---- the stated objectives -------------------------------------------------------------------------------------------


def whitened(world: World, advantages: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 over the tokens of a step."""
    count = world.mask.sum((1, 2), keepdim=True)
    mean = (advantages * world.mask).sum((1, 2), keepdim=True) / count
    deviation = (((advantages - mean) ** 2 * world.mask).sum((1, 2), keepdim=True) / count).sqrt()
    return (advantages - mean) / (deviation + EPS)


def later_sum(values: Tensor) -> Tensor:
    """Of this token and those behind it."""
    return values.flip(-1).cumsum(-1).flip(-1)


def generalized(world: World, earned: Tensor) -> Tensor:
    """Generalized advantage estimation of what each token has earned."""
    value = world.at(world.critic) * world.mask
    after = torch.cat([value[..., 1:], torch.zeros_like(value[..., :1])], -1)
    delta = (earned + GAMMA * after - value) * world.mask
    first = delta[..., 0] + GAMMA * LAMBDA * delta[..., 1]
    return torch.stack([first, delta[..., 1]], -1)


def stated_advantages(name: str, world: World, *, overlong: bool, kl: Tensor | None) -> Tensor:
    """`kl` is taken off the rewards of single tokens."""
    rewards = world.rewards[world.pairs]
    if overlong:  # a buffer of one token: a second one costs 1
        rewards = rewards - world.mask[..., 1].double()
    of_tokens = -(kl if kl is not None else torch.zeros(())) * world.mask
    summed = rewards + of_tokens.sum(-1)
    centred = summed - summed.mean(-1, keepdim=True)
    last = torch.stack([~world.mask[..., 1], world.mask[..., 1]], -1)  # where a reward is earned
    match name:
        case "grpo" | "dapo" | "gspo" | "gspo-token" | "cispo":
            each = centred / (summed.std(-1, keepdim=True) + EPS)
        case "dr-grpo":
            each = centred
        case "rloo":
            each = summed - summed.flip(-1)
        case "reinforce++":
            return whitened(world, later_sum(of_tokens + rewards[..., None] * last))
        case "reinforce++-baseline":
            return whitened(world, centred[..., None].expand(world.mask.shape))
        case "ppo":
            return whitened(world, generalized(world, of_tokens + rewards[..., None] * last))
        case "distill":
            return world.at(world.teacher) - world.at(world.old) + EARNED * rewards[..., None]
        case _:
            raise AssertionError(f"state the advantages of {name!r} here, and its loss in stated_term")
    return each[..., None].expand(world.mask.shape)


def stated_term(name: str, world: World, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """What a policy minimizes at each token."""
    log_ratio = (logprobs - world.at(world.old)) * world.mask
    mean = (log_ratio.sum(-1) / world.mask.sum(-1))[..., None].expand(world.mask.shape)
    low, high, ratio = 0.8, 1.2, log_ratio.exp()
    match name:
        case "cispo":
            return -ratio.detach().clamp(0, 5) * advantages * logprobs
        case "dapo":
            high = 1.28
        case "gspo":
            low, high, ratio = 1 - 3e-4, 1 + 4e-4, mean.exp()
        case "gspo-token":
            low, high, ratio = 1 - 3e-4, 1 + 4e-4, mean.exp().detach() * ratio / ratio.detach()
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def stated_weights(world: World, aggregation: str) -> Tensor:
    """Of each token in its step, times the probability of the pair."""
    length = world.mask.sum(-1, keepdim=True)
    match aggregation:
        case "token-mean":
            weights = 1 / length.sum(1, keepdim=True)
        case "sequence-mean":
            weights = 1 / (2 * length)
        case _:
            weights = torch.full_like(length, 1 / (2 * MOST), dtype=torch.float64)
    return weights * world.mask * world.probability[:, None, None]


def divergence(logprobs: Tensor, other: Tensor) -> Tensor:
    """[STATES] KL(p || other) over the whole vocabulary."""
    return (logprobs.exp() * (logprobs - other)).sum(-1)


def entropy(logprobs: Tensor) -> Tensor:
    return -(logprobs.exp() * logprobs).sum(-1)


def gradient_of(objective: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """By the logits of a policy whose log-probs are `at`."""
    leaf = at.clone().requires_grad_()
    (found,) = torch.autograd.grad(objective(leaf.log_softmax(-1)), leaf)
    return found


def assert_same(found: Tensor, exact: Tensor) -> None:
    """Up to the float32 of advantages and weights."""
    assert exact.norm() > 1e-3
    assert (found - exact).norm() / exact.norm() < 2e-6


# ---- each algorithm --------------------------------------------------------------------------------------------------

OPTIONS = {
    "ppo": (f"algorithms.ppo.gamma={GAMMA}", f"algorithms.ppo.gae_lambda={LAMBDA}"),
    "distill": (f"algorithms.distill.reward_coef={EARNED}",),
}
PENALTIES = {
    "the policy's term alone": (),
    "entropy, overlong and KL in the loss": (
        f"algorithm.entropy_coef={ENTROPY}",
        "algorithm.overlong=penalty",
        "algorithm.overlong_buffer=1",
        f"algorithm.kl_coef={KL}",
    ),
    "KL in the reward": (f"algorithm.kl_coef={KL}", "algorithm.kl_in=reward", "algorithm.dynamic_sampling=0"),
}


@pytest.mark.parametrize("penalties", PENALTIES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_expected_gradient_is_that_of_the_stated_objective(name: str, aggregation: str, penalties: str) -> None:
    # Teacher and reference are two targets of one KL: distillation takes no kl_coef.
    given = [each for each in PENALTIES[penalties] if not (name == "distill" and "kl_" in each)]
    overrides = [f"algorithm.aggregation={aggregation}", "algorithm.overlong=keep", *given, *OPTIONS.get(name, ())]
    with_kl = f"algorithm.kl_coef={KL}" in given
    in_reward = with_kl and "reward" in penalties
    in_loss = with_kl and not in_reward
    world = RANDOM
    old, reference, weights = world.at(world.old), world.at(world.reference), stated_weights(world, aggregation)
    advantages = stated_advantages(
        name, world, overlong="overlong" in penalties, kl=KL * (old - reference) if in_reward else None
    )

    def objective(logprobs: Tensor) -> Tensor:
        chosen = world.at(logprobs)
        term = stated_term(name, world, chosen, advantages)
        if "entropy" in penalties:
            term = term - ENTROPY * world.at(entropy(logprobs))
        if in_loss and aggregation == "constant-length":
            term = term + KL * world.at(divergence(logprobs, world.reference))
        elif in_loss:  # a weight depends on how many tokens come, so on the token itself
            term = term + KL * (chosen - old).exp() * ((reference - chosen).expm1() - (reference - chosen))
        return (weights * term).sum()

    for policy in (world.old, world.later):
        found = gradients(world, policy, name, *overrides)
        assert_same(found.gradient, gradient_of(objective, policy))
    assert 0 < found.metrics["clip_fraction"].value < 1 or name == "cispo"


# ---- the KL penalty --------------------------------------------------------------------------------------------------


def penalty_of(world: World, policy: Tensor, name: str, *settings: str) -> tuple[Tensor, float]:
    """The gradient that the KL penalty adds, and what it adds to the loss, both for a coefficient of 1."""
    found = gradients(world, policy, name, f"algorithm.kl_coef={KL}", *settings)
    without = gradients(world, policy, name, *(each for each in settings if "kl_" not in each))
    value = found.metrics["loss"].total - without.metrics["loss"].total
    return (found.gradient - without.gradient) / KL, value / KL


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("estimator", ["", "k1", "k2", "k3"])
def test_a_penalty_in_the_loss_has_the_kls_gradient(estimator: str, aggregation: str) -> None:
    world, weights = FIXED, stated_weights(FIXED, aggregation)
    settings = [f"algorithm.aggregation={aggregation}", *([f"algorithm.kl_estimator={estimator}"] if estimator else [])]

    def objective(logprobs: Tensor) -> Tensor:
        return (weights * world.at(divergence(logprobs, world.reference))).sum()

    for policy in (world.old, world.later):
        gradient, value = penalty_of(world, policy, "grpo", *settings)
        assert_same(gradient, gradient_of(objective, policy))
        unbiased = value == pytest.approx(objective(policy).item(), rel=1e-6)
        assert unbiased == (estimator != "k2")


def test_k3_differentiated_begins_with_the_other_kls_gradient() -> None:
    world, weights = FIXED, stated_weights(FIXED, "token-mean")
    settings = ("algorithm.aggregation=token-mean", "algorithm.kl_estimator=k3-differentiated")

    def forward(logprobs: Tensor) -> Tensor:
        return (weights * world.at(divergence(world.reference, logprobs))).sum()

    assert_same(penalty_of(world, world.old, "grpo", *settings)[0], gradient_of(forward, world.old))

    def reverse(logprobs: Tensor) -> Tensor:
        return (weights * world.at(divergence(logprobs, world.reference))).sum()

    later, _ = penalty_of(world, world.later, "grpo", *settings)
    for exact in (gradient_of(each, world.later) for each in (forward, reverse)):
        assert (later - exact).norm() / exact.norm() > 0.1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_in_the_reward_has_the_documented_gradient(estimator: str) -> None:
    world, weights = RANDOM, stated_weights(RANDOM, "constant-length")
    # With a discount of 0 a token is credited with its own penalty alone, as in the docs' table.
    free = ("algorithms.ppo.clip_low=1", "algorithms.ppo.clip_high=9")
    whole = ("algorithm.aggregation=constant-length", "algorithms.ppo.whiten=false", "algorithm.kl_in=reward")
    settings = (*whole, *free, "algorithms.ppo.gamma=0")
    apart = world.reference - world.old
    estimates = {"k1": -apart, "k2": apart**2 / 2, "k3": apart.expm1() - apart}[estimator]

    def objective(logprobs: Tensor) -> Tensor:
        reverse, forward = divergence(logprobs, world.reference), divergence(world.reference, logprobs)
        second = (logprobs.exp() * (logprobs - world.reference) ** 2 / 2).sum(-1)
        stated = {"k1": reverse, "k2": second - reverse, "k3": reverse - forward}
        return (weights * world.at(stated[estimator])).sum()

    def afterwards(logprobs: Tensor) -> Tensor:
        return (weights * world.at((logprobs.exp() * estimates).sum(-1))).sum()

    for policy, stated in ((world.old, objective), (world.later, afterwards)):
        found, _ = penalty_of(world, policy, "ppo", *settings, f"algorithm.kl_estimator={estimator}")
        assert_same(found, gradient_of(stated, policy))
