"""examples/tensor_parallel: on two ranks that share samples it computes what the plain backend does."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from corerl.config.schema import ClusterInfo
from corerl.plugin.registry import Kind, load
from corerl_testing.pool import OneRank, RankPool
from corerl_testing.subject import Runs, Subject
from corerl_testing.suite import test_checkpoints, test_forward, test_training

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tensor_parallel"
NAME = "my_backend:SPEC"


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory is on sys.path, as where a run starts there."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    importlib.invalidate_caches()


@pytest.fixture
def divided(beside: None, model_directories: dict[str, Path], tmp_path: Path) -> Iterator[Subject]:
    pool = RankPool(2)
    runs = Runs({1: OneRank(), 2: pool}, model_directories)
    yield Subject(backend=NAME, world_size=2, runs=runs, directory=tmp_path, options={"tensor_parallel": 2})
    pool.close()


def test_ranks_that_share_a_model_compute_what_one_does(divided: Subject) -> None:
    for kind in ("llama", "qwen3-tied"):  # with a padding token and an odd vocabulary; with tied embeddings
        test_forward.test_forward_gives_what_transformers_gives_in_the_samples_order(divided, kind, "packed")
    for kind in ("qwen3-tied", "qwen3-moe"):
        test_training.test_training_follows_the_plain_backend(divided, kind, "packed")
    test_training.test_a_step_takes_its_own_settings_of_adam(divided)
    test_checkpoints.test_the_checkpoint_goes_on_in_the_plain_backend_and_back(divided, "qwen3-moe")


def test_a_model_that_ranks_cannot_divide_is_refused(beside: None) -> None:
    spec = load(Kind.BACKENDS, NAME).spec

    def problems(**model: int) -> list[str]:
        cluster = ClusterInfo(device="cpu", ranks=6, model=model)
        return [problem.text for problem in spec.check(spec.config(tensor_parallel=3), cluster)]

    assert problems(num_attention_heads=6, num_key_value_heads=3, intermediate_size=96) == []
    assert problems(num_attention_heads=6, num_key_value_heads=2) == [
        "3 does not divide the model's num_key_value_heads of 2"
    ]
    assert spec.data_parallel(spec.config(tensor_parallel=3), ClusterInfo(device="cpu", ranks=6)) == 2
