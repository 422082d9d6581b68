"""The weights that a rank loads, and how much memory it holds while loading."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM

from corerl.config import ClusterInfo, structure
from corerl.plugin import Capability, Kind, load
from corerl_testing.causes import Mismatch
from corerl_testing.compare import (
    different,
    files_of,
    largest_parameter,
    require_same_state,
    whole,
)
from corerl_testing.harness import Setup
from corerl_testing.marks import check
from corerl_testing.models import DEEP, KINDS, tiny_config, tiny_fields
from corerl_testing.require import require, require_equal
from corerl_testing.scenarios import loading, training
from corerl_testing.subject import PLAIN, Subject


@check("C11", level=1, builds_on=["C02", "C04", "C06"])
@pytest.mark.parametrize("kind", KINDS)
def test_init_loads_the_models_weights_to_the_last_bit(subject: Subject, kind: str) -> None:
    ranks = subject.run(training.train_steps, subject.setup(kind), [])
    spec = load(Kind.BACKENDS, subject.backend).spec
    options = structure(dict(subject.options), spec.config, path="options")
    train, model = subject.setup(kind).train, tiny_config(kind).to_dict()
    cluster = ClusterInfo(device=subject.device, ranks=subject.world_size, model=model, train=train)
    for number, rank in enumerate(ranks):
        layout, parts = rank.init.layout, spec.data_parallel(options, cluster)
        require(
            layout.dp_size == parts,
            f"ParallelLayout.dp_size is {layout.dp_size} on rank {number} of {subject.world_size}, but the spec's "
            f"data_parallel returns {parts}: both are the number of shares that a step's samples are divided into",
        )
        place = (layout.rank, layout.world_size)
        require_equal("the list of rank and world_size in ParallelLayout", place, (number, subject.world_size))
        require(
            0 <= layout.dp_rank < layout.dp_size <= subject.world_size,
            f"rank {number} of {subject.world_size} has dp_rank {layout.dp_rank} of dp_size {layout.dp_size} in its "
            "ParallelLayout, expected 0 <= dp_rank < dp_size <= world_size",
        )
        counted = (rank.init.optimizer_step, rank.init.weights_version, rank.adam_step)
        require_equal("optimizer_step, weights_version and adam_step of a model that starts", counted, (0, 0, 0))
    loaded = whole([rank.at_start for rank in ranks])
    wanted: Any = AutoModelForCausalLM.from_pretrained(subject.model(kind), dtype=torch.float32)
    once, all_names = (dict(wanted.named_parameters(remove_duplicate=each)) for each in (True, False))
    tied = sorted(loaded["master"].keys() & (all_names.keys() - once.keys()))
    if tied:
        raise Mismatch(
            f"local_state('master') has {', '.join(tied)}, which the model ties to another weight: it is one tensor, "
            "and in chunks under one name, that of the files"
        )
    names = (sorted(each) for each in (loaded["master"], files_of(subject.model(kind))))
    require_equal("the set of weights in local_state('master')", *(dict.fromkeys(each) for each in names))
    known = {  # experts have other names in files
        name: param.detach().numpy() for name, param in wanted.named_parameters() if name in loaded["master"]
    }
    found = {name: loaded["master"][name] for name in known}
    require_same_state(
        "the weights after init and those in the files", {"master": found}, {"master": known}, ["master"]
    )
    for key in ("exp_avg", "exp_avg_sq"):
        for name, tensor in loaded[key].items():
            require(not tensor.any(), f"{key} of {name} has {np.abs(tensor).max()} before any step, expected zeros")


@check("C45", level=1, builds_on=["C11"])
@pytest.mark.parametrize("kind", ["qwen3-tied", f"qwen3-moe{DEEP}"])  # large beside its largest parameter
def test_loading_reads_each_ranks_share_once(subject: Subject, kind: str) -> None:
    directory = subject.model(kind)
    total = 4 * sum(math.prod(shape) for shape in files_of(directory).values())
    ranks = subject.run(loading.load_watched, subject.setup(kind), "", False)
    for number, rank in enumerate(ranks):
        require(
            rank.read == rank.held,
            f"rank {number} read {rank.read} bytes of the model's files, but its chunks of local_state('master') have "
            f"{rank.held}: each rank reads each of its own chunks once, replicas too, and nothing else",
        )
    owned = [rank.owned for rank in ranks]
    require(
        sum(owned) == total,
        f"chunks that are not replicas have {owned} bytes by rank, {sum(owned)} in all, but the model has {total}: "
        "each element is in one such chunk",
    )
    slack = 3 * 4 * largest_parameter(directory)
    for rank in ranks:
        require(
            rank.held <= rank.peak,
            f"{rank.peak} bytes at most were allocated while {rank.held} were loaded: masters are no tensors that "
            "PyTorch allocated, so that nothing can be measured",
        )
        what = "weights and memory for gradients; build allocates no more"
        _require_at_most(rank.peak, rank.resident + slack, "while loading", what)
        # If the rank's share is not the whole model, holding the model for a moment must exceed the bound.
        require(
            rank.held == total or rank.held + slack < total,
            f"a rank holds {rank.held} of {total} bytes, neither all nor less by more than three times the largest "
            "parameter: divide the large parameters among ranks, or none",
        )


def _require_at_most(found: int, allowed: int, when: str, what: str) -> None:
    require(
        found < allowed,
        f"{found} bytes were held at once {when}, but at most {allowed} are allowed: {what}, and three times the "
        "largest parameter",
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
def test_random_weights_depend_on_the_seed_alone(subject: Subject, kind: str) -> None:
    random = Setup(backend=PLAIN, model="", fields=tiny_fields(kind))
    found = subject.train(subject.of(random), [])
    wanted = subject.runs.trained_as(1, random, 0)
    what = "random weights of the seed {}, and plain's on one rank,"
    require_same_state(what.format(0), found.at_start, wanted.at_start, ["master"])
    spread = found.at_start["master"]["model.layers.0.self_attn.q_proj.weight"].std()
    require(0.016 < spread < 0.024, f"the standard deviation of q_proj is {spread}, expected 0.02, initializer_range")
    other = subject.train(evolve(subject.of(random), seed=1), [])
    wanted = subject.runs.trained_as(1, evolve(random, seed=1), 0)
    require_same_state(what.format(1), other.at_start, wanted.at_start, ["master"])
    changed = different(other.at_start, found.at_start, ["master"])
    require(changed, "seeds 0 and 1 give the same weights, expected others: config.seed is ignored")
