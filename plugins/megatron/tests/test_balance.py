"""The loss that balances experts: against transformers' router and autograd, and the same in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM

from corerl_testing import (
    GRAD_NORM,
    PACKINGS,
    WHOLE,
    RankPool,
    Runs,
    Setup,
    assert_follows,
    assert_same_metrics,
    grad_norm_of,
    metrics_of,
    samples_at,
)
from corerl_testing.scenarios import training
from plugins.megatron.tests import ranks
from plugins.megatron.tests.test_families import CP2, EP2, PP2, WHOLE_EXPERTS

COEF = 0.5
SPLIT: Mapping[str, Mapping[str, Any]] = {"cp2": CP2, "pp2": PP2, "tp2 sp etp1 ep2": {**WHOLE_EXPERTS, **EP2}}


@pytest.mark.parametrize(
    ("world_size", "packing"),
    # Padded: most of each sequence. One by one: 5 samples on 2 ranks, and so a filler.
    [(1, WHOLE), (1, (10**6, 32)), (2, PACKINGS["one by one"])],
    ids=["one micro-batch", "padded", "a sample a micro-batch, and a filler"],
)
def test_its_value_and_its_gradient_are_those_of_the_formula(
    runs: Runs, world_size: int, packing: tuple[int, int]
) -> None:
    """experts * sum_i (choices of i for each token) * (mean probability of i): a mean over layers, and over
    micro-batches by their tokens."""
    samples = samples_at(0)
    none_counts = samples.with_columns(loss_mask=np.zeros(len(samples.tokens), dtype=np.bool_))
    setup = balanced(runs.setup("megatron", "qwen3-moe", packing))
    found = runs.rank_sets[world_size].run(training.train_on, setup, none_counts)

    model = AutoModelForCausalLM.from_pretrained(
        runs.models["qwen3-moe"], dtype=torch.float64, experts_implementation="eager"
    )
    logits: list[list[torch.Tensor]] = []  # of each sample, by layer [tokens, experts]
    for start, end in zip(samples.offsets[:-1], samples.offsets[1:], strict=True):
        tokens = torch.tensor(samples.tokens[start:end])[None]
        logits.append(list(model(input_ids=tokens, output_router_logits=True).router_logits))
    experts, chosen = model.config.num_experts, model.config.num_experts_per_tok
    micro_batches = [[sample] for sample in logits] if packing == PACKINGS["one by one"] else [logits]
    total = torch.zeros((), dtype=torch.float64)
    for micro_batch in micro_batches:
        for layer in zip(*micro_batch, strict=True):
            probabilities = torch.cat(layer).softmax(-1)
            choices = torch.zeros_like(probabilities).scatter(1, probabilities.topk(chosen).indices, 1.0)
            loss = experts * (choices.mean(0) * probabilities.mean(0)).sum() / len(logits[0])
            total = total + loss * len(probabilities) / len(samples.tokens)
    (COEF * total).backward()
    grads = torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])

    assert metrics_of(found)["moe/aux_loss"] == pytest.approx(total.item(), rel=1e-6)
    assert grad_norm_of(found) == pytest.approx(float(grads.norm()), rel=GRAD_NORM.relative)
    assert grad_norm_of(found) > 1e-3


@pytest.mark.parametrize("layout", SPLIT)
def test_it_trains_alike_however_a_micro_batch_is_split(runs: Runs, layout: str) -> None:
    assert_same(runs, 2, SPLIT[layout], 1, {}, "full")


def test_it_trains_alike_with_experts_spread_over_the_ranks(runs: Runs) -> None:
    assert_same(runs, 2, EP2, 2, {})


def test_a_part_of_a_step_is_refused(runs: Runs, rank_pool: RankPool) -> None:
    """It is a mean over the step's tokens, of which one of several calls knows its own."""
    setup = balanced(runs.setup("megatron", "qwen3-moe"))
    for refused in rank_pool.run(ranks.refused_with_balance, setup):
        assert refused.startswith("Unsupported: a part of a step got train.aux_loss_coef=0.5, expected 0")


def assert_same(
    runs: Runs,
    world_size: int,
    options: Mapping[str, Any],
    other_ranks: int,
    others: Mapping[str, Any],
    recompute: str = "none",
) -> None:
    setup = balanced(runs.setup("megatron", "qwen3-moe", PACKINGS["padded"]))
    train = evolve(setup.train, recompute=recompute)
    found = runs.train(world_size, evolve(setup, train=train, options=options), range(3))
    wanted = runs.train(other_ranks, evolve(setup, options=others), range(3))
    assert_follows(found, wanted)
    assert_same_metrics(found, wanted)
    assert {"moe/aux_loss", "moe/entropy"} <= metrics_of(found.results[0]).keys()


def balanced(setup: Setup) -> Setup:
    return evolve(setup, train=evolve(setup.train, aux_loss_coef=COEF))
