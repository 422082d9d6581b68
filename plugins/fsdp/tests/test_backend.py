"""What is FSDP's own: shards without elements, its options, and what the checks must see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from torch.distributed.fsdp import FSDPModule

from corerl.checkpoint import begin
from corerl.config import LoraConfig, TrainConfig, WeightsConfig
from corerl_testing import Checkpoint, RankPool, Runs, Setup, Subject, assert_follows, different, tiny_fields
from corerl_testing.suite import CHECKS
from plugins.fsdp.tests import ranks


def test_ranks_that_hold_nothing_train_save_and_resume(runs: Runs, tmp_path: Path) -> None:
    # One expert: its router and its matrices have a single row, which lies on rank 0.
    fields = {**tiny_fields("qwen3-moe"), "num_experts": 1, "num_experts_per_tok": 1}
    setup, checkpoint = Setup(backend="fsdp", model="", fields=fields), Checkpoint(begin(tmp_path, 2), 2)
    uninterrupted = runs.train(2, setup, range(4), save_after=1, save_to=checkpoint.role)
    assert_follows(uninterrupted, runs.train(1, evolve(setup, backend="plain"), range(4)))
    resumed = runs.train(2, setup, range(2, 4), resume=checkpoint.complete())
    assert different(resumed.state, uninterrupted.state) == []


@pytest.mark.parametrize(
    ("family", "wanted"), [("olmo2", {torch.float32}), ("qwen3", {torch.bfloat16})], ids=["olmo2", "qwen3"]
)
def test_rotary_tables_keep_the_precision_that_the_model_gives_them(
    runs: Runs, family: str, wanted: set[torch.dtype]
) -> None:
    fields = {**tiny_fields("qwen3"), "model_type": family}
    setup = Setup(backend="fsdp", model="", fields=fields, train=TrainConfig(precision="bfloat16"))
    assert runs.rank_sets[1].run(ranks.rotary_dtypes, setup) == [wanted]


@pytest.mark.parametrize("reshard", [True, False])
def test_nothing_stays_gathered_after_a_pass(runs: Runs, rank_pool: RankPool, reshard: bool) -> None:
    setup = evolve(runs.setup("fsdp", "qwen3"), options={"reshard_after_forward": reshard})
    for held in rank_pool.run(ranks.held_after_passes, setup):
        assert max(held) <= 0


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot be told that a pass raised")
@pytest.mark.parametrize("reshard", [True, False])
def test_a_pass_that_raised_leaves_no_weights_behind(runs: Runs, rank_pool: RankPool, reshard: bool) -> None:
    setup = evolve(runs.setup("fsdp", "qwen3"), options={"reshard_after_forward": reshard})
    found, wanted = (rank_pool.run(ranks.after_a_pass, setup, raises) for raises in (True, False))
    for (after_error, noted), (logprobs, _) in zip(found, wanted, strict=True):
        assert np.array_equal(after_error, logprobs)
        assert noted == 0  # or a role without backward passes would note more and more


def test_a_rank_that_sends_nothing_holds_not_all_adapters(runs: Runs, rank_pool: RankPool) -> None:
    lora = LoraConfig(rank=64).settled({})
    setup = evolve(runs.setup("fsdp", "qwen3"), lora=lora, weights=WeightsConfig(bucket_bytes=2**14))
    (sender, its_part), (largest, part) = rank_pool.run(ranks.largest_of_an_update, setup)
    assert sender >= its_part + part  # which are merged there
    assert largest == part  # on its way to the sender


@pytest.mark.parametrize(
    ("fault", "check", "arguments", "said"),
    [
        (
            ranks.LoadsTheWholeModel,
            "test_loading_reads_each_ranks_share_once",
            {"kind": "qwen3-tied"},
            "were held at once while loading",
        ),
        (
            ranks.GathersTheWholeModel,
            "test_an_update_holds_a_few_buckets_and_never_the_model",
            {"kind": "qwen3-moe"},
            "an update allocated a tensor",
        ),
    ],
)
def test_a_rank_that_holds_the_whole_model_is_seen(
    runs: Runs, tmp_path: Path, fault: type, check: str, arguments: dict[str, str], said: str
) -> None:
    name = f"{fault.__module__}:{fault.__name__}.spec"
    subject = Subject(backend=name, world_size=2, runs=runs, directory=tmp_path)
    with pytest.raises(AssertionError, match=said):
        CHECKS[check](subject, **arguments)
