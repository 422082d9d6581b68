"""What of DeepSpeed's own settings is refused before a rank is started, and that the others reach DeepSpeed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from attrs import evolve
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

from corerl.config import ClusterInfo, TrainConfig
from corerl_deepspeed.config import DeepSpeedConfig
from corerl_deepspeed.raw import ELSEWHERE, STAGE_3, STAGES_1_AND_2, ZERO, refusals, settable
from corerl_deepspeed.settings import deepspeed_json
from corerl_deepspeed.spec import check
from corerl_testing import RankPool, Runs
from plugins.deepspeed.tests import ranks

# Of each setting that goes through, one value, which is neither DeepSpeed's nor this backend's default.
VALUES: dict[str, Any] = {
    f"{ZERO}.contiguous_gradients": False,
    f"{ZERO}.reduce_scatter": False,
    f"{ZERO}.use_multi_rank_bucket_allreduce": False,
    f"{ZERO}.overlap_comm": True,
    f"{ZERO}.sub_group_size": 1e6,
    f"{ZERO}.stage3_param_persistence_threshold": 7,
    f"{ZERO}.stage3_model_persistence_threshold": 8,
    f"{ZERO}.stage3_max_live_parameters": 9,
    f"{ZERO}.stage3_max_reuse_distance": 10,
    f"{ZERO}.stage3_module_granularity_threshold": 11,
    f"{ZERO}.stage3_use_all_reduce_for_fetch_params": True,
    f"{ZERO}.stage3_allgather_sequential": True,
    f"{ZERO}.ignore_unused_parameters": False,
    f"{ZERO}.parameter_alignment": True,
    f"{ZERO}.log_trace_cache_warnings": True,
    f"{ZERO}.enable_sanity_checks": True,
    f"{ZERO}.leaf_module.classes": ["Block"],
    f"{ZERO}.leaf_module.names": ["layers.0"],
    f"{ZERO}.leaf_module.name_suffixes": ["mlp"],
    "communication_data_type": "bf16",
    "disable_python_gc": True,
    "log_level": "info",
    "steps_per_print": 3,
    "dump_state": True,
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "comms_logger.enabled": True,
    "comms_logger.verbose": True,
    "comms_logger.prof_all": False,
    "comms_logger.debug": True,
    "comms_logger.prof_ops": ["all_reduce"],
    "flops_profiler.enabled": True,
    "flops_profiler.recompute_fwd_factor": 1.0,
    "flops_profiler.profile_step": 4,
    "flops_profiler.module_depth": 2,
    "flops_profiler.top_modules": 5,
    "flops_profiler.detailed": False,
    "flops_profiler.output_file": "profile.txt",
    "timers.throughput.enabled": False,
    "timers.throughput.synchronized": False,
}


READ_AS = {"communication_data_type": torch.bfloat16}


class Reading(dict[str, Any]):
    """Settings that note which of them DeepSpeed looks for."""

    def __init__(self, asked: set[str], prefix: str = "", **settings: Any) -> None:
        super().__init__(settings)
        self.asked, self.prefix = asked, prefix

    def __contains__(self, key: object) -> bool:
        self.asked.add(f"{self.prefix}{key}")
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(f"{self.prefix}{key}")
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(f"{self.prefix}{key}")
        return super().get(key, default)

    def keys(self) -> Any:
        return self  # `in settings.keys()` is asked too


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of "a.b"."""
    return reduce(lambda inner, key: {key: inner}, reversed(path.split(".")), value)


def deepspeed_reads(raw: Mapping[str, Any]) -> deepspeed_config.DeepSpeedConfig:
    told = deepspeed_json(
        DeepSpeedConfig(raw=raw), TrainConfig(), device="cpu", elements=1000, trained=1000, persistent=64
    )
    return deepspeed_config.DeepSpeedConfig(told)


# Where an engine looks for what stands in a table of its configuration.
PLACES = {
    "": "",
    ZERO: "zero_config",
    f"{ZERO}.leaf_module": "zero_config.leaf_module",
    "comms_logger": "comms_config.comms_logger",
    "flops_profiler": "flops_profiler_config",
    "timers.throughput": "timers_config",
}


def found_in(read: deepspeed_config.DeepSpeedConfig, path: str) -> Any:
    """The setting that the engine finds; None where there is no such table."""
    table, _, key = path.rpartition(".")
    names = {field.alias: name for name, field in DeepSpeedZeroConfig.model_fields.items() if field.alias}
    keys = [*filter(None, PLACES[table].split(".")), names.get(key, key)]
    return reduce(lambda found, each: getattr(found, each, None), keys, read)


def fields(table: str, model: Any) -> Iterator[str]:
    """Dotted, under the names that DeepSpeed's pages give them."""
    for name, field in model.model_fields.items():
        yield f"{table}.{field.alias or name}"


@pytest.mark.parametrize("name", [*STAGES_1_AND_2, *STAGE_3])
def test_a_setting_that_the_chosen_stage_does_not_read_is_refused_with_the_stages_that_do(name: str) -> None:
    value = next(value for path, value in VALUES.items() if path.startswith(f"{ZERO}.{name}"))
    raw = nested(f"{ZERO}.{name}", {"classes": ["Block"]} if name == "leaf_module" else value)
    readers = (3,) if name in STAGE_3 else (1, 2)
    fix = "set stage=3" if name in STAGE_3 else "set stage=1 or 2"
    for stage in (1, 2, 3):
        found = check(DeepSpeedConfig(stage=stage, raw=raw), ClusterInfo(device="cuda", ranks=4))  # type: ignore[arg-type]
        told = [(problem.path, problem.text.partition(" with ")[2]) for problem in found]
        text = f"stage={stage}, which ignores it; {fix}, or remove it"
        assert told == ([] if stage in readers else [(f"raw.{ZERO}.{name}", text)])


def test_the_stages_read_what_deepspeed_gives_their_optimizers() -> None:
    def taken(optimizer: type) -> set[str]:
        names = {field: model.alias or field for field, model in DeepSpeedZeroConfig.model_fields.items()}
        asked = {field.removeprefix("zero_") for field in inspect.signature(optimizer).parameters}
        return {name for field, name in names.items() if field in asked}

    zero = {path.removeprefix(f"{ZERO}.") for path in settable() if path.startswith(f"{ZERO}.")}
    whole, sharded = taken(DeepSpeedZeroOptimizer) & zero, taken(DeepSpeedZeroOptimizer_Stage3) & zero
    assert whole - sharded == {*STAGES_1_AND_2}
    # The others are read where parameters are sharded or gathered.
    elsewhere = {"stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "leaf_module"}
    assert sharded - whole == {*STAGE_3} - elsewhere


def test_all_that_deepspeed_reads_is_let_through_or_refused_by_name() -> None:
    asked: set[str] = set()
    profiler = Reading(asked, "flops_profiler.")
    deepspeed_config.DeepSpeedConfig(Reading(asked, train_micro_batch_size_per_gpu=1, flops_profiler=profiler))
    # Those of Ulysses are read before.
    assert '"sequence_parallel_size" in config and "data_parallel_size" in config' in inspect.getsource(
        deepspeed.initialize
    )
    reads = {
        *asked,
        *("sequence_parallel_size", "data_parallel_size", "timers.throughput"),
        *fields(ZERO, DeepSpeedZeroConfig),
        *(f"{ZERO}.{name}" for name in deepspeed_config._REMOVED_ZERO_CONFIG_KEYS),
        *fields(f"{ZERO}.leaf_module", DeepSpeedZeroLeafModuleConfig),
        *fields("comms_logger", CommsLoggerConfig),
        *fields("timers.throughput", DeepSpeedThroughputTimerConfig),
    }
    assert {*settable(), *ELSEWHERE} == {*reads, f"{ZERO}.prefetch_bucket_size"}  # its other name; we say the first
    assert "prefetch_bucket_size" in DeepSpeedZeroConfig.model_fields


def test_the_page_names_what_goes_through() -> None:
    page = (Path(__file__).parents[3] / "docs" / "backends" / "deepspeed.md").read_text()
    assert [
        path for path in settable() if path.count(".") <= path.count(ZERO) and f"`{path.split('.')[-1]}`" not in page
    ] == []


def test_a_value_of_each_setting_is_here() -> None:
    tables = {path.rpartition(".")[0] for path in settable()} | {"timers"}
    assert set(VALUES) == {*settable()} - tables


@pytest.mark.parametrize("path", VALUES)
def test_what_goes_through_is_what_deepspeed_reads(path: str) -> None:
    raw = nested(path, VALUES[path])
    assert list(refusals(raw)) == []
    assert found_in(deepspeed_reads({}), path) != READ_AS.get(path, VALUES[path])
    assert found_in(deepspeed_reads(raw), path) == READ_AS.get(path, VALUES[path])


def test_the_engine_trains_with_the_users_settings(runs: Runs, rank_pool: RankPool) -> None:
    raw = {ZERO: {"sub_group_size": 1000, "stage3_max_live_parameters": 5000}, "memory_breakdown": True}
    setup = runs.setup("deepspeed", "qwen3")
    (alone, *_), (found, *_) = (
        rank_pool.run(ranks.engine_settings, evolve(setup, options=options)) for options in ({}, {"raw": raw})
    )
    assert (alone.groups, found.groups > 2 * alone.groups) == (2, True)  # with weight decay, and without
    assert (found.max_live_parameters, found.memory_breakdown) == (5000, True)
    assert found.grad_norm == pytest.approx(alone.grad_norm, rel=1e-12)  # a sum over more groups, in another order


@pytest.mark.parametrize("path", ELSEWHERE)
def test_what_has_another_place_is_refused_with_it(path: str) -> None:
    assert list(refusals(nested(path, True))) == [
        (path, f"true cannot be set here: {ELSEWHERE[path]}; remove it here"),
    ]


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (
            {"gradient_clipping": 1.0},
            "gradient_clipping: number 1.0 cannot be set here: set train.optimizer.clip_norm; remove it here",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}},
            "optimizer: a table cannot be set here: set train.optimizer, which is AdamW; remove it here",
        ),
        ({ZERO: True}, f"{ZERO}: expected table, got true"),
        ({ZERO: {"stage": 2}}, f"{ZERO}.stage: integer 2 cannot be set here: set stage; remove it here"),
        ({"zero_optimzation": {"stage": 1}}, "zero_optimzation: unknown key; did you mean 'zero_optimization'?"),
        ({"sub_group_size": 1}, "sub_group_size: unknown key; did you mean 'zero_optimization.sub_group_size'?"),
        ({ZERO: {"stagee": 1}}, f"{ZERO}.stagee: unknown key; did you mean 'stage'?"),
        (
            {ZERO: {"max_live_parameters": 1}},  # pydantic's name, which DeepSpeed takes beside that of its pages
            f"{ZERO}.max_live_parameters: unknown key; did you mean 'stage3_max_live_parameters'?",
        ),
        ({"timers": {"x": 1}}, "timers.x: unknown key; known: throughput"),
        ({ZERO: {"sub_group_size": "auto"}}, f"{ZERO}.sub_group_size: expected number, got string 'auto'"),
        ({ZERO: {"sub_group_size": 1.5}}, f"{ZERO}.sub_group_size: must be a whole number of at least 0, got 1.5"),
        (
            {"communication_data_type": {"type": "bf16"}},
            "communication_data_type: expected one of 'fp32', 'bf16', 'fp16', got a table",
        ),
        ({ZERO: {"leaf_module": "Block"}}, f"{ZERO}.leaf_module: expected table, got string 'Block'"),
        ({"steps_per_print": 0}, "steps_per_print: must be at least 1, got 0"),
    ],
    ids=str,
)
def test_a_line_says_what_stands_there_and_what_to_do(raw: dict[str, Any], line: str) -> None:
    found = check(DeepSpeedConfig(raw=raw), ClusterInfo(device="cuda", ranks=4))
    assert [f"{problem.path}: {problem.text}" for problem in found] == [f"raw.{line}"]
