"""What is DeepSpeed's own: where its memory is, and parameters that are partitioned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from transformers import AutoConfig, AutoModelForCausalLM

from corerl.checkpoint import begin
from corerl.config import OptimizerConfig, TrainConfig
from corerl_testing import Checkpoint, RankPool, Runs, Setup, assert_follows, different, tiny_fields
from plugins.deepspeed.tests import ranks

# Its router has a correction of [1, experts] that no gradient moves.
ERNIE = {
    "model_type": "ernie4_5_moe",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 32,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_layer_start_index": 0,
    "max_position_embeddings": 128,
}


def test_ranks_that_hold_nothing_train_save_and_resume(runs: Runs, tmp_path: Path) -> None:
    # One expert: its router's single row, 64 elements, lies on both ranks; of the value and key norms there is less.
    fields = {**tiny_fields("qwen3-moe"), "num_experts": 1, "num_experts_per_tok": 1}
    setup, checkpoint = Setup(backend="deepspeed", model="", fields=fields), Checkpoint(begin(tmp_path, 2), 2)
    uninterrupted = runs.train(2, setup, range(4), save_after=1, save_to=checkpoint.role)
    assert_follows(uninterrupted, runs.train(1, evolve(setup, backend="plain"), range(4)))
    resumed = runs.train(2, setup, range(2, 4), resume=checkpoint.complete())
    assert different(resumed.state, uninterrupted.state) == []


@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_that_transformers_freezes_does_not_decay(runs: Runs, stage: int, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ERNIE), dtype=torch.float32)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "moe_statics" in name:  # which begins as zeros
                param.normal_()
    model.save_pretrained(tmp_path)
    train = TrainConfig(precision="float32", optimizer=OptimizerConfig(lr=0.1, weight_decay=0.1))
    setup = Setup(backend="deepspeed", model=str(tmp_path), options={"stage": stage}, train=train)
    before, after = (runs.train(1, setup, range(steps)).state["master"] for steps in (0, 3))
    frozen = [name for name in before if "moe_statics" in name]
    assert len(frozen) == 2 and all(before[name].any() for name in frozen)
    assert {name for name in before if (before[name] == after[name]).all()} == {*frozen}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, []),
        ({"stage": 1, "offload": "optimizer"}, ["optimizer"]),
        ({"stage": 3, "offload": "parameters"}, ["optimizer", "parameters"]),
        ({"node_shard_size": 2}, ["second copies"]),
    ],
    ids=str,
)
def test_deepspeed_does_what_the_options_say(
    runs: Runs, rank_pool: RankPool, options: Mapping[str, Any], wanted: list[str]
) -> None:
    for found in rank_pool.run(ranks.offloaded, evolve(runs.setup("deepspeed", "qwen3"), options=options)):
        assert {name for name, so in found.items() if so} == set(wanted)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_nothing_stays_gathered_after_a_pass(runs: Runs, rank_pool: RankPool, recompute: str) -> None:
    setup = runs.setup("deepspeed", "qwen3")
    for held in rank_pool.run(ranks.held_after_passes, evolve(setup, train=evolve(setup.train, recompute=recompute))):
        assert max(held) < 4096, held


@pytest.mark.parametrize(("options", "own_groups"), [({"stage": 2}, 0), ({}, 0), ({"node_shard_size": 2}, 1)], ids=str)
def test_a_model_shares_the_ranks_group_and_leaves_nothing_behind(
    runs: Runs, rank_pool: RankPool, options: Mapping[str, Any], own_groups: int
) -> None:
    setup = evolve(runs.setup("deepspeed", "qwen3"), options=options)
    nothing = ranks.Left(modules=0, policy=False, groups=0, groups_meanwhile=own_groups)
    assert rank_pool.run(ranks.left_behind, setup) == [nothing] * 2


def test_a_model_is_let_go_though_a_save_failed(runs: Runs, rank_pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    setup = runs.setup("deepspeed", "qwen3")
    for said, policy, group in rank_pool.run(ranks.after_a_save_that_failed, setup, str(tmp_path / "file")):
        assert said.startswith("SaveFailed: the background save failed: cannot write")
        assert not policy and not group


@pytest.mark.processes
def test_after_sleep_parameters_are_gathered_ahead_as_before(runs: Runs, rank_pool: RankPool) -> None:
    setup = evolve(runs.setup("deepspeed", "qwen3-deep"), options={"gather_bucket": 20_000})
    for first, second, third, awake, after in rank_pool.run(ranks.gathers, setup):
        assert len(first) > 2 * len(second)  # before DeepSpeed knows what comes next
        assert second == third == after
        # Norms, which sleep has freed besides.
        assert [forward for forward, _ in awake] == [forward for forward, _ in third]
        assert all(wanted <= found for (_, found), (_, wanted) in zip(awake, third, strict=True))


@pytest.mark.parametrize("stage", [2, 3])
def test_no_flat_memory_is_made_to_be_dropped_at_once(runs: Runs, rank_pool: RankPool, stage: int) -> None:
    setup = evolve(runs.setup("deepspeed", "qwen3"), options={"stage": stage})
    for dropped, flat in rank_pool.run(ranks.largest_dropped, setup):
        assert dropped < 0.5 * flat
