"""Policies over five words, small enough to sum over everything that they can say: expectations without noise.

A sample is one word or two. `World` knows the probability of each pair of samples, which is an optimizer step;
`gradients` are CoreRL's, of a run's config on all pairs, each weighted with its probability. What they should be is
written down in `test_enumeration.py`, with torch alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property, partial

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from corerl.algorithms import LossInputs
from corerl.algorithms.kl import token_kl
from corerl.algorithms.losses import clipped
from corerl.algorithms.registry import resolve_loss
from corerl.config.load import config_of
from corerl.data.packing import plan_steps
from corerl.driver.advantages import compute_advantages
from corerl.plan.algorithm import AlgorithmPlan, plan_algorithm
from corerl.plan.resolve import plugins_of, resolve_tables, settle_algorithm
from corerl.plugin.registry import Kind, load
from corerl.plugin.spec import ACTOR
from corerl.types import Metric, Output, ParallelLayout, SampleBatch, offsets_of

WORDS, MOST = 5, 2  # in the vocabulary, and in a sample
STATES = WORDS + 1  # before the first word, and after each that may be the first
LAYOUT = ParallelLayout(rank=0, world_size=1, dp_rank=0, dp_size=1)


def normal(seed: int, *shape: int) -> Tensor:
    # Of numpy, whose streams are the same everywhere: the docs print what comes of them.
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


@frozen(kw_only=True, eq=False)
class World:
    """Pairs of samples of the old policy. Axes: P pairs, 2 samples of each, `MOST` tokens of each sample."""

    ends: bool  # word 0 ends a sample; if False, all samples have two words

    # Log-probs of each word at each state, [STATES, WORDS].
    @cached_property
    def old(self) -> Tensor:
        return normal(0, STATES, WORDS).log_softmax(-1)

    @cached_property
    def reference(self) -> Tensor:
        return normal(1, STATES, WORDS).log_softmax(-1)

    @cached_property
    def teacher(self) -> Tensor:
        return normal(2, STATES, WORDS).log_softmax(-1)

    @cached_property
    def later(self) -> Tensor:
        """After an optimizer step: some ratios are within a clip of 0.2, others beyond."""
        return (self.old + 0.3 * normal(3, STATES, WORDS)).log_softmax(-1)

    @cached_property
    def critic(self) -> Tensor:
        """[STATES] the values before the update."""
        return normal(4, STATES)

    @cached_property
    def samples(self) -> list[list[int]]:
        """Every sample that the policy can say."""
        said = [[a, b] for a in range(WORDS) for b in range(WORDS) if a or not self.ends]
        return [[0], *said] if self.ends else said

    @cached_property
    def rewards(self) -> Tensor:
        """[samples] in steps of 1/2, so that different samples may have the same."""
        return (normal(5, len(self.samples)) * 2).round() / 2

    @cached_property
    def pairs(self) -> Tensor:
        """[P, 2] indices of samples; the order of the two makes no difference."""
        return torch.combinations(torch.arange(len(self.samples)), with_replacement=True)

    @cached_property
    def words(self) -> Tensor:
        """[P, 2, MOST]; 0 behind the end."""
        return torch.tensor([[*said, 0][:MOST] for said in self.samples])[self.pairs]

    @cached_property
    def states(self) -> Tensor:
        """[P, 2, MOST] in which each word was chosen."""
        return torch.tensor([[0, said[0] + 1] for said in self.samples])[self.pairs]

    @cached_property
    def mask(self) -> Tensor:
        """[P, 2, MOST] which words there are."""
        return torch.tensor([[1, len(said) == MOST] for said in self.samples], dtype=torch.bool)[self.pairs]

    @cached_property
    def probability(self) -> Tensor:
        """[P] with which the old policy samples a pair."""
        of_each = (self.at(self.old) * self.mask).sum((1, 2)).exp()
        return of_each * torch.where(self.pairs[:, 0] == self.pairs[:, 1], 1.0, 2.0)

    def at(self, table: Tensor) -> Tensor:
        """[P, 2, MOST] what a table [STATES, WORDS] or [STATES] has for each word."""
        return table[self.states, self.words] if table.ndim == 2 else table[self.states]

    # ---- as CoreRL holds them ----------------------------------------------------------------------------------------

    @cached_property
    def batch(self) -> SampleBatch:
        """All pairs, behind a prompt of one token; a pair is the group of one prompt."""
        lengths = self.mask.sum(-1).flatten().numpy()
        batch = SampleBatch(
            tokens=self.flat(self.words).numpy(),
            offsets=offsets_of(1 + lengths),
            columns={"loss_mask": self.flat(self.mask).numpy()},
            row_columns={"group": np.repeat(np.arange(len(self.pairs)), 2), "response_length": lengths},
        )
        tables = {
            "old_logprobs": self.old,
            "rollout_logprobs": self.old,
            "ref_logprobs": self.reference,
            "teacher_logprobs": self.teacher,
            "values": self.critic,
        }
        return batch.with_columns(**{name: self.flat(self.at(table)).numpy() for name, table in tables.items()})

    def flat(self, values: Tensor) -> Tensor:
        """[N] the tokens of [P, 2, MOST], with 0 at prompts."""
        padded, present = (
            torch.cat([torch.full_like(each[..., :1], first), each], -1)
            for each, first in ((values, 0), (self.mask, True))
        )
        return padded[present]

    @cache  # noqa: B019
    def weights(self, aggregation: str) -> Tensor:
        """[N] of each token in the step of its pair, times the pair's probability."""
        steps = [self.batch.take_rows(np.array([2 * pair, 2 * pair + 1])) for pair in range(len(self.pairs))]
        scales = [
            plan_steps(each, LAYOUT, tokens_per_micro_batch=99, aggregation=aggregation, max_tokens=MOST, seed=0)[0]
            for each in steps
        ]
        of_samples = torch.tensor(np.stack([each.scales for each in scales])) * self.probability[:, None]
        return self.flat(of_samples[..., None].expand(-1, -1, MOST))


RANDOM, FIXED = World(ends=True), World(ends=False)


@cache
def planned(name: str, *overrides: str) -> AlgorithmPlan:
    given = {
        "backend": {"name": "plain"},
        "rollout": {"engine": "fake", "max_tokens": MOST},
        "algorithm": {"name": name},
        "roles": {role: {} for role in load(Kind.ALGORITHMS, name).spec.roles if role != ACTOR},
    }
    config = resolve_tables(settle_algorithm(config_of(given, overrides)))
    return plan_algorithm(config, plugins_of(config))


@cache
def trained(world: World, name: str, *overrides: str) -> SampleBatch:
    """The batch with what losses read. An algorithm of whole batches sees one pair at a time."""
    plan, alone = planned(name, *overrides), not load(Kind.ALGORITHMS, name).spec.by_prompt
    wanted = {"loss_mask", "old_logprobs", "rollout_logprobs", *(name for each in plan.passes for name in each.columns)}
    batch = SampleBatch(
        tokens=world.batch.tokens,
        offsets=world.batch.offsets,
        columns={name: column for name, column in world.batch.columns.items() if name in wanted},
        row_columns=world.batch.row_columns,
    )
    rewards = world.rewards[world.pairs].flatten().float().numpy()
    steps = np.arange(len(batch)).reshape(-1, 2) if alone else np.arange(len(batch))[None]
    computed = partial(compute_advantages, estimate=plan.estimate, algorithm=plan.settings, max_tokens=MOST)
    found = [computed(batch.take_rows(step), rewards[step]).samples.columns for step in steps]
    return batch.with_columns(**{name: np.concatenate([each[name] for each in found]) for name in found[0]})


@frozen(kw_only=True)
class Found:
    """What CoreRL's loss of the actor gives in expectation."""

    gradient: Tensor  # at the policy's logits [STATES, WORDS]
    metrics: Mapping[str, Metric]


def gradients(world: World, policy: Tensor, name: str, *overrides: str) -> Found:
    """Of the actor's loss in a run with this algorithm and settings, at a policy's log-probs."""
    objective, batch = planned(name, *overrides).objectives[ACTOR], trained(world, name, *overrides)
    leaf = policy.clone().requires_grad_()
    logprobs = leaf.log_softmax(-1)
    inputs = LossInputs(
        logprobs=world.flat(world.at(logprobs)),
        entropy=world.flat(world.at(-(logprobs.exp() * logprobs).sum(-1))),
        columns={
            **{name: torch.from_numpy(column) for name, column in batch.columns.items()},
            "weights": world.weights(objective.aggregation),
        },
        bounds=torch.from_numpy(batch.offsets),
    )
    assert objective.loss.outputs == (Output.LOGPROBS, Output.ENTROPY)
    result = resolve_loss(objective.loss)(inputs)
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    metrics = {n: Metric(m.total.item(), m.weight.item(), m.reduction) for n, m in result.metrics.items()}
    return Found(gradient=gradient, metrics=metrics)


# ---- the table of the docs -------------------------------------------------------------------------------------------

POLICIES = 1000
# What the penalty's gradient is that of, in the first optimizer step on a batch and in later ones. Tested.
REVERSE, FORWARD, AT_OLD = "KL(p \\|\\| q)", "KL(q \\|\\| p)", "mean under p of what was estimated before it"
PENALTIES = {
    ("loss", "k1"): (REVERSE, "the same"),
    ("loss", "k2"): (REVERSE, "the same"),
    ("loss", "k3"): (REVERSE, "the same"),
    ("loss", "k3-differentiated"): (FORWARD, "neither KL"),
    ("reward", "k1"): (REVERSE, AT_OLD),
    ("reward", "k2"): (f"mean of k2 - {REVERSE}", AT_OLD),
    ("reward", "k3"): (f"{REVERSE} - {FORWARD}", AT_OLD),
}


def kl_table() -> str:
    """Rows for each place and estimator, from one token of `POLICIES` pairs of policy and reference: logits are normal;
    a later policy is half a step of gradient descent on the KL away, and 0.3 of normal noise."""
    old, reference, noise = (normal(seed, POLICIES, WORDS) for seed in (10, 11, 12))
    later = old - 0.5 * _exact(old, reference)[1] + 0.3 * noise
    numbers = "error | cosine | value"
    lines = [
        f"| `kl_in` | `kl_estimator` | first step: gradient of | {numbers} | later steps: gradient of | {numbers} |",
        f"|{'---|' * 10}",
    ]
    for (place, estimator), names in PENALTIES.items():
        cells = [f"`{place}`", f"`{estimator}`"]
        for name, policy in zip(names, (old, later), strict=True):
            value, exact = _exact(policy, reference)
            of_loss = _in_loss if place == "loss" else _in_reward
            estimate, gradient = of_loss(policy, old, reference, estimator)
            error = (gradient - exact).norm(dim=-1) / exact.norm(dim=-1)
            cosine = torch.cosine_similarity(gradient, exact)
            bias = (estimate - value).abs() / value
            cells += [name, _shown(error.median()), f"{_shown(cosine.median())} ({_shown(cosine.min())})"]
            cells.append(_shown(bias.median()))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(number: Tensor) -> str:
    return f"{float(number) + 0.0:.2f}".replace("-0.00", "0.00")


def _exact(logits: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """[n] KL(policy || reference) and its gradients [n, WORDS]."""
    leaf = logits.clone().requires_grad_()
    logprobs = leaf.log_softmax(-1)
    value = (logprobs.exp() * (logprobs - reference.log_softmax(-1))).sum(-1)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def _in_loss(logits: Tensor, old: Tensor, reference: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """[n] the penalty's expected value, and its gradients [n, WORDS]."""
    leaf, sampled = logits.clone().requires_grad_(), old.log_softmax(-1)
    weights = sampled.exp().requires_grad_()
    columns = {"weights": weights, "advantages": torch.zeros_like(old), "old_logprobs": sampled}
    columns |= {"rollout_logprobs": sampled, "ref_logprobs": reference.log_softmax(-1)}
    inputs = LossInputs(
        logprobs=leaf.log_softmax(-1).flatten(), columns={name: column.flatten() for name, column in columns.items()}
    )
    loss = clipped(inputs, kl_coef=1.0, kl_estimator=estimator).loss
    gradient, values = torch.autograd.grad(loss, (leaf, weights))  # the loss is linear in the weights
    return (values * sampled.exp()).sum(-1), gradient


def _in_reward(logits: Tensor, old: Tensor, reference: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """The same for a penalty that each token's reward has, with no credit for what follows, and no clip."""
    leaf, sampled = logits.clone().requires_grad_(), old.log_softmax(-1)
    values = token_kl(
        sampled.flatten().numpy(),
        reference.log_softmax(-1).flatten().numpy(),
        np.ones(old.numel(), np.bool_),
        estimator=estimator,
    )
    columns = {"weights": sampled.exp(), "advantages": -torch.from_numpy(values), "old_logprobs": sampled}
    inputs = LossInputs(
        logprobs=leaf.log_softmax(-1).flatten(),
        columns={**{name: column.flatten() for name, column in columns.items()}, "rollout_logprobs": sampled.flatten()},
    )
    (gradient,) = torch.autograd.grad(clipped(inputs, clip_low=1.0, clip_high=1e9).loss, leaf)
    return (torch.from_numpy(values).reshape(old.shape) * sampled.exp()).sum(-1), gradient
