"""Layouts that the conformance suite does not take by itself: each trains as the plain backend does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from attrs import evolve

from corerl.testing.compare import assert_follows, assert_same_metrics
from corerl.testing.pool import RankPool
from corerl.testing.subject import STEPS, Runs

TWO = {
    "tp2": {"tensor_parallel": 2},
    "tp2 sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2},
    "pp2 vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "cp2": {"context_parallel": 2},
    "dp2, whole optimizer": {"distributed_optimizer": False},
    "dp2, in small buckets beside computation": {
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket": 4096,
    },
}
FOUR = {
    "tp2 pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "tp2 dp2": {"tensor_parallel": 2},
    "pp2 cp2": {"pipeline_parallel": 2, "context_parallel": 2},
    "tp2 sp cp2": {"tensor_parallel": 2, "sequence_parallel": True, "context_parallel": 2},
}
EXPERTS = {
    "ep2": {"expert_parallel": 2},
    "tp2 sp ep2 etp1": {
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "expert_parallel": 2,
        "expert_tensor_parallel": 1,
    },
}


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def runs_of_four(runs: Runs, four_ranks: RankPool) -> Runs:
    return Runs({**runs.rank_sets, 4: four_ranks}, runs.models)


def assert_trains_as_plain(runs: Runs, world_size: int, kind: str, options: Mapping[str, Any]) -> None:
    setup = evolve(runs.setup("megatron", kind), options=options)
    found = runs.train(world_size, setup, range(STEPS))
    wanted = runs.trained_as(1, runs.setup("plain", kind))
    assert_follows(found, wanted)
    assert_same_metrics(found, wanted)


@pytest.mark.parametrize("layout", TWO)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied"])
def test_two_ranks_train_as_the_plain_backend_does(runs: Runs, kind: str, layout: str) -> None:
    assert_trains_as_plain(runs, 2, kind, TWO[layout])


@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_on_two_ranks_train_as_the_plain_backend_does(runs: Runs, layout: str) -> None:
    assert_trains_as_plain(runs, 2, "qwen3-moe", EXPERTS[layout])


@pytest.mark.parametrize("layout", FOUR)
def test_four_ranks_train_as_the_plain_backend_does(runs_of_four: Runs, layout: str) -> None:
    assert_trains_as_plain(runs_of_four, 4, "qwen3-tied", FOUR[layout])
