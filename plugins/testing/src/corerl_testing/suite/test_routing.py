"""Routed experts: what a backend reports, what it replays, and how it balances them."""

from __future__ import annotations

from functools import partial

import pytest
from attrs import evolve

from corerl.plugin import Capability
from corerl_testing.marks import check
from corerl_testing.models import drawn_model, tiny_config
from corerl_testing.routing import assert_balances, assert_replays
from corerl_testing.scenarios import training
from corerl_testing.subject import PACKINGS, Subject


@check("C60", level=1, needs=[Capability.ROUTING_REPLAY, Capability.MOE], builds_on=["C15", "C51"])
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_experts_are_reported_as_chosen_and_replayed_as_given(subject: Subject, packing: str) -> None:
    setup = subject.setup("qwen3-moe", PACKINGS[packing])
    assert_replays(
        subject.model("qwen3-moe"), lambda samples: subject.run(training.replay_experts, setup, samples, 0.02)
    )


@check("C76", level=1, needs=[Capability.AUX_LOSS, Capability.MOE], builds_on=["C15", "C51"])
def test_a_balancing_loss_has_the_gradients_of_transformers(subject: Subject) -> None:
    """Of a model with one layer of experts: how several are weighed against each other is the backend's own."""
    config = tiny_config("qwen3-moe")
    config.mlp_only_layers = [0]
    directory = subject.directory / "model"
    drawn_model(config).save_pretrained(directory)
    setup = evolve(subject.setup("qwen3-moe", PACKINGS["one by one"]), model=str(directory))
    assert_balances(directory, setup, partial(subject.run, training.first_step))
