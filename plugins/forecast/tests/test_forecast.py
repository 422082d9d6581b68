from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.memory import CASES, predicted
from corerl.config import ModelConfig
from corerl.models import hf_config, meta_model, size_of
from corerl.types import MemoryKind
from corerl_forecast.footprint import with_tower
from corerl_forecast.forecast import GIB, PROCESS, Forecaster
from corerl_testing import make_plan
from plugins.forecast.tests.planned import EXTENSIONS, LARGE, forecaster_of, memory_of, on_gpus, predictions
from tests.driver.saved import CRITIC, DATA, TEACHER, config_in

MEASURED = {row["name"]: row for row in json.loads(Path("benchmarks/results/memory.json").read_text())["rows"]}


OF_FSDP = ["fsdp", "fsdp-compiled", "fsdp-recompute", "fsdp-single", "fsdp-gemma3", "fsdp-gemma3-kept", "fsdp-experts"]


@pytest.mark.parametrize("name", [*OF_FSDP, "deepspeed-1", "deepspeed-3", "megatron"])
def test_predictions_are_within_a_tenth_of_measurements(name: str) -> None:
    found, row = predicted(CASES[name]), MEASURED[name]
    assert found.training == pytest.approx(row["measured"], rel=0.1)
    weights = found.rank.kinds[MemoryKind.PARAM]
    assert found.passing == pytest.approx(weights + row["measured_forward"], rel=0.1)


def test_memory_is_predicted_stage_by_stage(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"algorithm": {"kl_coef": 0.1}, "model": {**DATA["model"], "config": LARGE}}
    train = {"precision": "bfloat16", "tokens_per_micro_batch": 4096}
    memory = memory_of(on_gpus(tmp_path, roles={"actor": {"ranks": 4}}, train=train, **tables))
    assert memory.unknown == ()
    assert list(memory.stages) == ["train actor", "forward actor", "update"]
    layer = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    numbers = 4 * layer + 2 * 151936 * 4096 + 4096
    parts = memory.stages["train actor"].parts
    assert parts["actor's weights"] == parts["actor's gradients"] == parts["actor's moments"] // 2 == numbers * 4 // 4
    update = memory.stages["update"].parts
    assert update["the engine's weights"] == numbers * 2
    assert update["memory to gather in"] == update["buckets"] // 2 * 5 // 4 and "adapters to merge" not in update
    assert {stage.parts["processes"] for stage in memory.stages.values()} == {2 * PROCESS}
    first, *others = memory.lines()
    assert first.startswith("predicted memory of a device: train actor ") and "actor's weights 1.9," in first
    assert len(others) == 2 and memory.lines(fullest=True) == [first]


def test_an_update_merges_adapters_that_are_gathered_whole_in_float32(tmp_path: Path) -> None:
    config = on_gpus(
        tmp_path, roles={"actor": {"ranks": 2}}, model={**DATA["model"], "config": LARGE}, lora={"rank": 8}
    )
    forecaster = forecaster_of(config)
    layer = 8 * (2 * 4096 + 2 * 4096 + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    adapters = 4 * layer
    parts = forecaster.forecast().stages["update"].parts
    assert parts["adapters to merge"] == 4 * adapters
    assert parts["memory to gather in"] == (parts["buckets"] // 2 + 4 * adapters) * 3 // 2


def test_what_cannot_fit_is_refused_with_what_would_help(tmp_path: Path) -> None:
    train = {"precision": "bfloat16", "tokens_per_micro_batch": 32768}
    forecaster = forecaster_of(on_gpus(tmp_path, model={**DATA["model"], "config": LARGE}, train=train))
    found = forecaster.forecast()
    needed = found.stages["train actor"].total
    assert list(forecaster.too_large(found, there=needed)) == []
    now, half = forecaster.role("actor"), forecaster.role("actor", tokens_per_micro_batch=16384)
    less = forecaster.role("actor", recompute="full")
    assert not isinstance(less, str) and not isinstance(now, str) and not isinstance(half, str)
    there = needed - now.training + half.training
    (line,) = forecaster.too_large(found, there=there)
    wanted = f"training needs {needed / GIB:.1f} GiB of a device, which has {there / GIB:.1f}: train actor "
    assert line.startswith(f"roles.actor.ranks: {wanted}")
    assert f"set train.recompute='full' ({(needed - now.training + less.training) / GIB:.1f} GiB)" in line
    assert f"train.tokens_per_micro_batch=16384 ({there / GIB:.1f} GiB)" in line and "or more ranks" in line
    (line,) = forecaster.too_large(found, there=5 * GIB)  # where no setting is enough
    assert "; set more ranks, or options of the backend" in line


def test_roles_that_never_sleep_add_up_on_their_device(tmp_path: Path) -> None:
    config = on_gpus(tmp_path, train={"precision": "bfloat16"}, **CRITIC)
    in_turns = forecaster_of(config)
    together = forecaster_of(evolve(config, cluster=evolve(config.cluster, offload="never")))
    critic = together.role("critic")
    assert not isinstance(critic, str)
    parts = together.forecast().stages["train actor"].parts
    kinds = critic.rank.kinds  # whose gradients are gone by then
    assert parts["the critic"] == sum(kinds.values()) - kinds[MemoryKind.GRAD] > 0
    assert parts["the engine's weights"] == in_turns.forecast().stages["update"].parts["the engine's weights"] > 0
    alone = in_turns.forecast().stages["train actor"].parts
    assert "the critic" not in alone and "the engine's weights" not in alone


def with_actor(forecaster: Forecaster, actor: Any) -> Forecaster:
    processes = evolve(forecaster.plan.processes, roles={"actor": actor})
    return Forecaster(evolve(forecaster.plan, processes=processes))


def test_what_cannot_be_predicted_is_said_with_its_reason(tmp_path: Path) -> None:
    forecaster = forecaster_of(on_gpus(tmp_path))
    plan = forecaster.plan.processes.roles["actor"]
    silent = evolve(plan, backend=evolve(plan.backend, spec=evolve(plan.backend.spec, memory=None)))
    found = with_actor(forecaster, silent).forecast()
    assert found.stages == {}
    assert found.unknown == ("the memory of the actor is not predicted: the backend 'fsdp' does not tell",)


def test_a_sample_longer_than_a_micro_batch_counts_as_one(tmp_path: Path) -> None:
    model = {**DATA["model"], "config": {**LARGE, "max_position_embeddings": 40960}}
    train = {"precision": "bfloat16", "tokens_per_micro_batch": 4096}
    rollout = {**DATA["rollout"], "context_length": 8192}
    short, long = (
        memory_of(on_gpus(tmp_path, model=model, train=train, rollout=each)) for each in (DATA["rollout"], rollout)
    )
    few, many = short.stages["train actor"].parts, long.stages["train actor"].parts
    assert many["activations of 8,192 tokens"] > 1.3 * few["activations of 4,096 tokens"]


def test_saved_batches_may_be_larger_than_sampled_ones(tmp_path: Path) -> None:
    few = {**DATA["rollout"], "prompts": 2, "samples": 2, "max_tokens": 4, "context_length": 8}
    forecaster = forecaster_of(on_gpus(tmp_path, rollout=few))
    config = forecaster.plan.config
    saved = evolve(forecaster.plan, config=evolve(config, run=evolve(config.run, mode="train-only")))
    counted, unknown = forecaster.role("actor"), Forecaster(saved).role("actor")
    assert not isinstance(counted, str) and not isinstance(unknown, str)
    assert counted.single and not unknown.single and counted.training < unknown.training


def test_on_cpus_nothing_is_predicted(tmp_path: Path) -> None:
    assert make_plan(config_in(tmp_path / "run", extensions=EXTENSIONS)).notices == ()


def test_a_start_notes_the_fullest_stage_alone(tmp_path: Path) -> None:
    config = on_gpus(tmp_path)
    lines = memory_of(config).lines()
    assert len(lines) > 1
    assert predictions(make_plan(config).notices) == lines[:1]
    assert predictions(make_plan(config, starting=False).notices) == lines


def test_a_frozen_role_needs_no_memory_for_an_optimizer(tmp_path: Path) -> None:
    model = {**DATA["model"], "config": LARGE}
    teacher = {"ranks": 1, "model": {"config": {**LARGE, "num_hidden_layers": 8}}}
    tables = {**TEACHER, "model": model, "roles": {"teacher": teacher}}
    found = memory_of(on_gpus(tmp_path, **tables))
    assert "train teacher" not in found.stages
    stage = found.stages["forward teacher"]
    elements = size_of(meta_model(hf_config(ModelConfig(config=teacher["model"]["config"])))).total
    assert stage.parts["teacher's weights"] == 2 * elements
    assert {part for part in stage.parts if "teacher's" in part} == {"teacher's weights"}

    small = on_gpus(tmp_path, **tables)
    forecaster = forecaster_of(small)
    (line,) = [
        line
        for line in forecaster.too_large(found, there=stage.total // 2)
        if line.startswith("roles.teacher.ranks: a forward pass needs ")
    ]
    assert "recompute" not in line and "more ranks" in line


def test_roles_that_share_devices_pass_samples_at_once(tmp_path: Path) -> None:
    algorithm = {"name": "distill", "old_logprobs": "recompute"}
    stages = memory_of(on_gpus(tmp_path, **{**TEACHER, "algorithm": algorithm})).stages
    actor, teacher = stages["forward actor"], stages["forward teacher"]
    assert actor.total == teacher.total
    own = sum(count for part, count in actor.parts.items() if part.startswith(("actor's", "activations")))
    assert teacher.parts["the actor as it passes"] == own > 0


def test_a_tower_is_counted_whole_on_each_rank(tmp_path: Path) -> None:
    fields = tomllib.loads(Path("examples/pictures.toml").read_text())["model"]["config"]
    whole = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**fields))
    text = {id(param) for part in (whole.get_decoder(), whole.get_output_embeddings()) for param in part.parameters()}
    count = sum(param.numel() for param in whole.parameters() if id(param) not in text)
    own = dict.fromkeys(MemoryKind, 0)
    config = AutoConfig.for_model(**fields)
    assert with_tower(own, config, trained=False, precision="bfloat16") == {**own, MemoryKind.PARAM: 2 * count}
    wanted = {**own, MemoryKind.PARAM: 4 * count, MemoryKind.GRAD: 4 * count, MemoryKind.OPTIMIZER: 8 * count}
    assert with_tower(own, config, trained=True, precision="bfloat16") == wanted
    config_of_run = on_gpus(
        tmp_path,
        model={"tokenizer": "characters:01234=rgbsct#", "config": fields, "pictures": "vision", "tower": "trained"},
        rollout={"sampler": "count-shapes", "engine": "transformers", "max_tokens": 1},
        data={"held_out": 4},
        train={"precision": "bfloat16", "tokens_per_micro_batch": 4096},
    )
    parts = memory_of(config_of_run).stages["train actor"].parts
    assert parts["actor's gradients"] == 4 * sum(param.numel() for param in whole.parameters())
