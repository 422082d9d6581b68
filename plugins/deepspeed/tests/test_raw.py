"""What of DeepSpeed's own settings is refused before a rank is started, and that the others reach DeepSpeed."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from corerl.config import ClusterInfo
from corerl_deepspeed.config import DeepSpeedConfig
from corerl_deepspeed.raw import INSTEAD, SETTABLE, ZERO
from corerl_deepspeed.spec import check
from corerl_testing import RankPool, Runs
from plugins.deepspeed.tests import ranks


class Reading(dict[str, Any]):
    """Settings that note which of them DeepSpeed looks for."""

    def __init__(self, asked: set[str], **settings: Any) -> None:
        super().__init__(settings)
        self.asked = asked

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self  # `in settings.keys()` is asked too


def test_the_installed_deepspeed_reads_every_setting_that_goes_through() -> None:
    asked: set[str] = set()
    deepspeed_config.DeepSpeedConfig(Reading(asked, train_micro_batch_size_per_gpu=1))
    zero = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    assert {*SETTABLE, *INSTEAD} - {f"{ZERO}.{name}" for name in zero} <= {*asked, "timers", "sequence_parallel_size"}


def test_the_stages_read_what_deepspeed_gives_their_optimizers() -> None:
    def taken(optimizer: type) -> set[str]:
        names = {field: model.alias or field for field, model in DeepSpeedZeroConfig.model_fields.items()}
        asked = {field.removeprefix("zero_") for field in inspect.signature(optimizer).parameters}
        return {f"{ZERO}.{name}" for field, name in names.items() if field in asked} & SETTABLE.keys()

    whole, sharded = taken(DeepSpeedZeroOptimizer), taken(DeepSpeedZeroOptimizer_Stage3)
    assert whole - sharded == {path for path, stages in SETTABLE.items() if stages == (1, 2)}
    # The others are read where parameters are sharded or gathered.
    elsewhere = {"stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "leaf_module"}
    only_3 = {path for path, stages in SETTABLE.items() if stages == (3,)}
    assert sharded - whole == only_3 - {f"{ZERO}.{name}" for name in elsewhere}


def test_the_page_names_what_goes_through() -> None:
    page = (Path(__file__).parents[3] / "docs" / "backends" / "deepspeed.md").read_text()
    assert [path for path in SETTABLE if f"`{path.split('.')[-1]}`" not in page] == []


def test_the_engine_trains_with_the_users_settings(runs: Runs, rank_pool: RankPool) -> None:
    raw = {ZERO: {"sub_group_size": 1000, "stage3_max_live_parameters": 5000}, "memory_breakdown": True}
    setup = runs.setup("deepspeed", "qwen3")
    (alone, *_), (found, *_) = (
        rank_pool.run(ranks.engine_settings, evolve(setup, options=options)) for options in ({}, {"raw": raw})
    )
    assert (alone.groups, found.groups > 2 * alone.groups) == (2, True)  # with weight decay, and without
    assert (found.max_live_parameters, found.memory_breakdown) == (5000, True)
    assert found.grad_norm == pytest.approx(alone.grad_norm, rel=1e-12)  # a sum over more groups, in another order


@pytest.mark.parametrize(
    ("stage", "raw", "line"),
    [
        (3, {"optimizer": {"lr": 1}}, "optimizer: cannot be set here: set train.optimizer, which is AdamW; remove it"),
        (3, {ZERO: True}, f"{ZERO}: expected a table, got True"),
        (3, {ZERO: {"stage": 2}}, f"{ZERO}.stage: cannot be set here: set stage; remove it here"),
        (3, {"zenflow": 1}, "zenflow: is no setting that can be set here"),
        (
            3,
            {ZERO: {"sub_group_sizes": 1}},
            f"{ZERO}.sub_group_sizes: is no setting that can be set here; did you mean",
        ),
        (
            2,
            {ZERO: {"sub_group_size": 1}},
            f"{ZERO}.sub_group_size: has no effect with stage=2; set stage=3, or remove",
        ),
    ],
    ids=str,
)
def test_a_line_says_what_stands_there_and_what_to_do(stage: Any, raw: dict[str, Any], line: str) -> None:
    found = check(DeepSpeedConfig(stage=stage, raw=raw), ClusterInfo(device="cuda", ranks=4))
    (told,) = [f"{problem.path}: {problem.text}" for problem in found]
    assert told.startswith(f"raw.{line}")
