"""Weight updates: an engine gets every tensor once, as trained."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from corerl.config.schema import WeightsConfig
from corerl.models.build import stored_buffers
from corerl.plugin.capabilities import Capability
from corerl_testing.compare import (
    assert_follows,
    different,
    files_of,
    same_bits,
    whole,
)
from corerl_testing.marks import check
from corerl_testing.models import BUFFERS
from corerl_testing.scenarios import updates
from corerl_testing.subject import PLAIN, Subject


@check("C21", level=1, builds_on=["C12"], variants={"kind": "qwen3-tied"})
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "qwen3-moe"])
def test_an_update_delivers_every_tensor_once_and_bit_for_bit(subject: Subject, kind: str, tmp_path: Path) -> None:
    ranks = subject.run(updates.push_weights, subject.setup(kind), False)
    trained = whole([rank.state for rank in ranks])["master"]
    root, *others = ranks
    assert sorted(root.names) == sorted(files_of(subject.model(kind)))
    assert different({"master": root.tensors}, {"master": trained}, ["master"]) == []
    trained_then = whole([rank.state_then for rank in ranks])["master"]
    assert different({"master": root.tensors_then}, {"master": trained_then}, ["master"]) == []
    assert root.result.version == 1 and root.result.engines == {"engine-0": ""}
    assert root.result.bytes == sum(4 * tensor.size for tensor in trained.values())
    assert [(other.names, other.result.bytes) for other in others] == [([], 0)] * len(others)

    shutil.copy(subject.model(kind) / "config.json", tmp_path)
    save_file({name: torch.tensor(value) for name, value in root.tensors.items()}, tmp_path / "model.safetensors")
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    model, found = from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(found[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, param in model.named_parameters():
        if name in trained:
            assert same_bits(param.detach().numpy(), trained[name])


@check("C21", level=1, builds_on=["C12"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_an_update_can_reach_every_rank_in_bfloat16(subject: Subject, kind: str) -> None:
    setup = evolve(subject.setup(kind), weights=WeightsConfig(bucket_bytes=2**14, dtype="bfloat16"))
    ranks = subject.run(updates.push_weights, setup, True)
    trained = whole([rank.state for rank in ranks])["master"]
    rounded = {name: torch.tensor(value).bfloat16().float().numpy() for name, value in trained.items()}
    for rank in ranks:
        assert sorted(rank.names) == sorted(trained)
        assert different({"master": rank.tensors}, {"master": rounded}, ["master"]) == []


@check("C46", level=1, builds_on=["C21"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_an_update_holds_a_few_buckets_and_never_the_model(subject: Subject, kind: str) -> None:
    ranks = subject.run(updates.push_watched, subject.setup(kind))
    total = sum(4 * math.prod(shape) for shape in files_of(subject.model(kind)).values())
    assert any(rank.largest for rank in ranks)  # a rank that sends nothing and has only replicas needs no memory
    for rank in ranks:
        assert rank.largest <= 4 * rank.bucket < total / 2
        assert rank.peak < total / 2


@check("C47", level=1, builds_on=["C21"])
def test_an_engine_that_fails_is_an_entry_and_training_goes_on(subject: Subject) -> None:
    ranks = subject.run(updates.push_to_a_failing_engine, subject.setup("qwen3"))
    assert ranks[0].result.engines == {"engine-0": "out of memory"}
    assert ranks[0].then.engines == {"engine-0": ""}
    assert ranks[0].names == ranks[0].wanted


@check("C22", level=1, builds_on=["C21"])
def test_a_version_that_is_not_above_all_earlier_ones_is_refused_before_any_byte_moves(subject: Subject) -> None:
    for rank in subject.run(updates.push_weights, subject.setup("qwen3"), False):
        assert rank.refused.startswith("WeightUpdateError: weights version 1 was refused")
        assert rank.arrived_after == 0


@check("C22", level=1, builds_on=["C18", "C21"])
def test_a_resumed_run_goes_on_with_the_versions_it_had_reached(subject: Subject) -> None:
    ranks = subject.run(updates.version_after_resume, subject.setup("qwen3"), str(subject.directory / "actor"))
    for version, refused in ranks:
        assert version == 7 and refused.startswith("WeightUpdateError: weights version 6 was refused")


@check(
    "C64",
    level=1,
    needs=[Capability.MOE, Capability.BUFFERS],
    builds_on=["C15", "C18", "C19", "C21", "C27", "C41", "C51"],
)
def test_weights_in_buffers_are_loaded_sent_and_saved_as_they_are_and_no_step_changes_them(subject: Subject) -> None:
    setup, checkpoint = subject.setup(BUFFERS), subject.checkpoint(1)
    model: Any = AutoModelForCausalLM.from_pretrained(subject.model(BUFFERS), dtype=torch.float32)
    held = {name: buffer.numpy() for name, buffer in stored_buffers(model).items()}
    assert held and all(buffer.any() for buffer in held.values())
    trained = subject.train(setup, range(2), save_after=1, save_to=checkpoint.role)
    plain = subject.runs.trained_as(1, subject.runs.setup(PLAIN, BUFFERS), 2)
    assert_follows(trained, plain)
    resumed = subject.runs.train(1, subject.runs.setup(PLAIN, BUFFERS), [], resume=checkpoint.complete())
    for state in (trained.at_start, trained.state, resumed.state):
        assert different(state, {"buffer": held}, ["buffer"]) == []
    # Rounded to bfloat16, a router's bias would send tokens to other experts.
    setup = evolve(setup, weights=WeightsConfig(bucket_bytes=2**14, dtype="bfloat16"))
    root, *_ = subject.run(updates.push_weights, setup, False)
    sent = {name: root.tensors[name] for name in held}
    assert different({"buffer": sent}, {"buffer": held}, ["buffer"]) == []
    assert sorted(root.names) == sorted(files_of(subject.model(BUFFERS)))
