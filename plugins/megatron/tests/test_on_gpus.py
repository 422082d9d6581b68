"""What the conformance suite asks of one GPU and of two, in layouts of four."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from corerl.config import ClusterInfo
from corerl_megatron.config import MegatronConfig
from corerl_megatron.spec import SPEC
from corerl_testing import RankPool, Runs, Subject
from corerl_testing.suite import test_gpu

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs"),
    pytest.mark.processes,
]

TP2 = {"tensor_parallel": 2, "sequence_parallel": True}
DENSE: dict[str, dict[str, Any]] = {
    "tp2 sp pp2": {**TP2, "pipeline_parallel": 2},
    "tp2 sp dp2": TP2,
    "pp2 dp2": {"pipeline_parallel": 2},
    "cp2 dp2": {"context_parallel": 2},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "ep4": {"expert_parallel": 4},
    "tp2 sp ep2 etp1": {**TP2, "expert_parallel": 2, "expert_tensor_parallel": 1},
}


def of_kinds(dense: str) -> pytest.MarkDecorator:
    """Layouts with this kind of dense model, and all with experts."""
    cases = [*((layout, dense) for layout in DENSE), *((layout, "qwen3-moe") for layout in DENSE | EXPERTS)]
    return pytest.mark.parametrize(("layout", "kind"), cases, indirect=["layout"], scope="module")


@pytest.fixture(scope="module")
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def runs_on_gpus(layout: str, runs: Runs) -> Iterator[Runs]:
    options = MegatronConfig(**(DENSE | EXPERTS)[layout])
    pool = RankPool(4, "cuda", SPEC.environment(options, ClusterInfo(device="cuda", ranks=4)))
    yield runs.beside({4: pool})
    pool.close()


@pytest.fixture
def subject(layout: str, runs_on_gpus: Runs, tmp_path: Path) -> Subject:
    return Subject(
        backend="megatron",
        world_size=4,
        runs=runs_on_gpus,
        directory=tmp_path,
        options=(DENSE | EXPERTS)[layout],
        device="cuda",
    )


@pytest.mark.parametrize(
    "check",
    [
        test_gpu.test_sleep_frees_most_of_the_memory_that_training_took,
        test_gpu.test_ten_rounds_of_sleep_lose_no_bit_and_no_memory,
        test_gpu.test_to_sleep_or_to_wake_twice_does_nothing,
    ],
)
@pytest.mark.parametrize("layout", DENSE, indirect=True, scope="module")
def test_sleep_passes_the_suites_checks(subject: Subject, check: Callable[[Subject], None]) -> None:
    check(subject)


@of_kinds("qwen3-tied")
def test_an_update_right_after_waking_delivers_what_was_trained(subject: Subject, kind: str) -> None:
    test_gpu.test_an_update_right_after_waking_delivers_what_was_trained(subject, kind)


@of_kinds("qwen3")
def test_passes_and_steps_give_the_numbers_of_a_cpu(subject: Subject, kind: str) -> None:
    test_gpu.test_forward_on_gpus_gives_what_transformers_gives_on_a_cpu(subject, kind)
    test_gpu.test_training_on_gpus_follows_the_plain_backend_on_a_cpu(subject, kind)
