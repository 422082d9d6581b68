"""The weights that a rank loads, and how much memory it holds while loading."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM

from corerl.config.load import structure
from corerl.config.schema import ClusterInfo
from corerl.plugin.capabilities import Capability
from corerl.plugin.registry import Kind, load
from corerl_testing.compare import (
    different,
    files_of,
    largest_parameter,
    same_bits,
    whole,
)
from corerl_testing.harness import Setup
from corerl_testing.marks import check
from corerl_testing.models import DEEP, KINDS, tiny_config, tiny_fields
from corerl_testing.scenarios import loading, training
from corerl_testing.subject import PLAIN, Subject


@check("C11", level=1, builds_on=["C02", "C04", "C06"])
@pytest.mark.parametrize("kind", KINDS)
def test_init_tells_where_training_stands_and_loads_the_models_weights_to_the_last_bit(
    subject: Subject, kind: str
) -> None:
    ranks = subject.run(training.train_steps, subject.setup(kind), [])
    spec = load(Kind.BACKENDS, subject.backend).spec
    options = structure(dict(subject.options), spec.config, path="options")
    train, model = subject.setup(kind).train, tiny_config(kind).to_dict()
    told = ClusterInfo(device=subject.device, ranks=subject.world_size, model=model, train=train)
    for number, rank in enumerate(ranks):
        layout = rank.init.layout
        assert layout.dp_size == spec.data_parallel(options, told), "BackendSpec.data_parallel returns another size"
        assert (layout.rank, layout.world_size) == (number, subject.world_size)
        assert 0 <= layout.dp_rank < layout.dp_size <= subject.world_size
        assert (rank.init.optimizer_step, rank.init.weights_version, rank.adam_step) == (0, 0, 0)
    loaded = whole([rank.at_start for rank in ranks])
    wanted: Any = AutoModelForCausalLM.from_pretrained(subject.model(kind), dtype=torch.float32)
    assert loaded["master"].keys() == files_of(subject.model(kind)).keys()
    for name, param in wanted.named_parameters():
        if name in loaded["master"]:  # experts have other names in files
            assert same_bits(loaded["master"][name], param.detach().numpy())
    assert not any(tensor.any() for key in ("exp_avg", "exp_avg_sq") for tensor in loaded[key].values())


@check("C45", level=1, builds_on=["C11"])
@pytest.mark.parametrize("kind", ["qwen3-tied", f"qwen3-moe{DEEP}"])  # large beside its largest parameter
def test_loading_reads_each_ranks_share_once_and_never_holds_the_model(subject: Subject, kind: str) -> None:
    directory = subject.model(kind)
    total = 4 * sum(math.prod(shape) for shape in files_of(directory).values())
    ranks = subject.run(loading.load_watched, subject.setup(kind), "", False)
    assert [rank.read for rank in ranks] == [rank.held for rank in ranks]
    assert sum(rank.owned for rank in ranks) == total
    slack = 3 * 4 * largest_parameter(directory)
    for rank in ranks:
        assert rank.held <= rank.peak  # the measurement works
        what = "weights and memory for gradients; build allocates no more"
        _require_at_most(rank.peak, rank.resident + slack, "while loading", what)
        # If the rank's share is not the whole model, holding the model for a moment must exceed the bound.
        assert rank.held == total or rank.held + slack < total


def _require_at_most(found: int, allowed: int, when: str, what: str) -> None:
    assert found < allowed, (
        f"{found} bytes were held at once {when}, but at most {allowed} are allowed: {what}, and three times the "
        "largest parameter"
    )


@check("C49", level=1, needs=[Capability.SNAPSHOTS], builds_on=["C18", "C45", "C48"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_resuming_and_snapshots_hold_no_more_than_each_ranks_share(subject: Subject, kind: str) -> None:
    setup, checkpoint = subject.setup(kind), subject.checkpoint(1)
    subject.train(setup, [0], save_after=0, save_to=checkpoint.role)
    slack = 3 * 4 * largest_parameter(subject.model(kind))
    for rank in subject.run(loading.load_watched, setup, checkpoint.complete(), True):
        _require_at_most(
            rank.peak,
            rank.resident + 2 * rank.held + slack,
            "while resuming",
            "weights, memory for gradients, two moments",
        )
        _require_at_most(rank.snapshot_peak, rank.weights + slack, "while a snapshot was made or loaded", "one copy")


@check("C11", level=1, builds_on=["C02", "C04", "C06"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_random_weights_follow_from_the_seed_and_not_from_the_number_of_ranks(subject: Subject, kind: str) -> None:
    random = Setup(backend=PLAIN, model="", fields=tiny_fields(kind))
    found = subject.train(subject.of(random), [])
    wanted = subject.runs.trained_as(1, random, 0)
    assert different(found.at_start, wanted.at_start, ["master"]) == []
    assert found.at_start["master"]["model.layers.0.self_attn.q_proj.weight"].std() == pytest.approx(0.02, rel=0.2)
    other = subject.train(evolve(subject.of(random), seed=1), [])
    assert different(other.at_start, subject.runs.trained_as(1, evolve(random, seed=1), 0).at_start, ["master"]) == []
    assert different(other.at_start, found.at_start, ["master"]) != []
