"""What is refused before a rank is started, and what DeepSpeed is told."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from corerl.config import ClusterInfo, OptimizerConfig, TrainConfig, structure
from corerl.errors import ConfigError, Unsupported
from corerl.plugin import Capability
from corerl_deepspeed.config import DeepSpeedConfig
from corerl_deepspeed.settings import deepspeed_json
from corerl_deepspeed.spec import SPEC, check
from corerl_testing import check_capabilities


def told(ranks: int = 4, train: TrainConfig | None = None, **options: Any) -> list[str]:
    found = check(DeepSpeedConfig(**options), ClusterInfo(device="cuda", ranks=ranks, train=train))
    return [f"{problem.path}: {problem.text}" for problem in found]


def settings(train: TrainConfig | None = None, **options: Any) -> dict[str, Any]:
    config = structure(options, DeepSpeedConfig, path="backends.deepspeed")
    return deepspeed_json(config, train or TrainConfig(), device="cpu", elements=1000, trained=1000, persistent=64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stage": 1},
        {"stage": 2, "offload": "optimizer"},
        {"offload": "parameters", "node_shard_size": 2},
        {"raw": {"zero_optimization": {"overlap_comm": False, "sub_group_size": 1000}, "wall_clock_breakdown": True}},
        {"stage": 2, "raw": {"zero_optimization": {"overlap_comm": True}}},
    ],
    ids=str,
)
def test_what_fits_is_let_through(options: dict[str, Any]) -> None:
    assert told(train=TrainConfig(), **options) == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"stage": 2, "offload": "parameters"}, "offload: 'parameters' with stage=2, which keeps all parameters on"),
        ({"stage": 2, "node_shard_size": 2}, "node_shard_size: 2 with stage=2, which shards no parameters; set"),
        ({"node_shard_size": 3}, "node_shard_size: 3 does not divide the role's 4 ranks; use a divisor of 4, or 1"),
        ({"stage": 1, "raw": {"zero_optimization": {"overlap_comm": True}}}, "raw.zero_optimization.overlap_comm:"),
    ],
    ids=str,
)
def test_what_contradicts_is_refused_under_the_setting_that_mends_it(options: dict[str, Any], line: str) -> None:
    assert any(line in each for each in told(**options))


def test_nvme_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError) as raised:
        structure({"offload": "nvme"}, DeepSpeedConfig, path="backends.deepspeed")
    assert str(raised.value) == (
        "backends.deepspeed.offload: 'nvme' is not supported, since sleep and checkpoints cannot reach masters, "
        "moments or weights in DeepSpeed's files; set 'optimizer' or 'parameters' to offload to host memory"
    )


def test_the_precision_that_would_be_wrong_is_refused() -> None:
    with pytest.raises(
        Unsupported, match="'float16', which the backend 'deepspeed' does not support yet: DeepSpeed raises"
    ):
        check_capabilities(SPEC, {Capability.FLOAT16: "train.precision = 'float16'"}, name="deepspeed")
    assert told(train=TrainConfig(precision="bfloat16"), stage=1) == []


def test_deepspeed_is_told_what_the_config_says() -> None:
    train = TrainConfig(precision="bfloat16", optimizer=OptimizerConfig(clip_norm=0.25))
    found = settings(train, stage=2, offload="optimizer", reduce_bucket=300, gather_bucket=501)
    assert found["gradient_clipping"] == 0.25
    assert found["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert found["zero_optimization"] == {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_bucket_size": 300,
        "allgather_bucket_size": 500,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    assert settings(evolve(train, precision="float32"))["bf16"]["enabled"] is False


def test_a_bucket_fills_the_segments_that_torch_takes_for_it() -> None:
    config = DeepSpeedConfig()
    assert (4 * config.reduce_bucket) % 2**21 == 0  # bytes; torch's CUDACachingAllocator.cpp, kRoundLarge


def test_buckets_are_no_larger_than_the_model() -> None:
    zero = settings()["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (1000, 1000)


def test_the_users_table_is_merged_into_it() -> None:
    raw = {"zero_optimization": {"overlap_comm": True, "sub_group_size": 7}, "memory_breakdown": True}
    mine, merged = settings(), settings(raw=raw)
    assert merged["memory_breakdown"] is True
    assert merged["zero_optimization"] == {**mine["zero_optimization"], **raw["zero_optimization"]}  # type: ignore[dict-item]
    assert {key: merged[key] for key in mine if key != "zero_optimization"} == {
        key: mine[key] for key in mine if key != "zero_optimization"
    }


def test_deepspeed_is_told_the_device_before_it_looks_for_one() -> None:
    for device in ("cpu", "cuda"):
        assert SPEC.environment(DeepSpeedConfig(), ClusterInfo(device=device, ranks=1)) == {"DS_ACCELERATOR": device}
