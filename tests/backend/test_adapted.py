"""What the base class makes of a role that trains adapters: its reference is the model, of which no copy is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from corerl.backend import StateKey
from corerl.config.schema import LoraConfig
from corerl.driver.export import write_adapters
from corerl.errors import ModelError
from corerl.models.lora import peft_config
from corerl.trainer.worker import Worker
from corerl.types import Array, Output
from corerl_testing.harness import Setup, forward, running, samples_at, train
from tests.driver.adapted import column_of

LORA = LoraConfig(rank=3, alpha=7.0).settled({})
SAMPLES = samples_at(0)
REFERENCE = "reference"


@pytest.fixture
def setup(model_directories: Mapping[str, Path]) -> Setup:
    base = Setup(backend="plain", model=str(model_directories["qwen3-tied"]), lora=LORA)
    # Not clipped, so that three steps change the log-probs by much more than rounding.
    return evolve(base, train=evolve(base.train, optimizer=evolve(base.train.optimizer, clip_norm=None)))


def passed(worker: Worker, setup: Setup, weights: str = "") -> Array:
    """Log-probs of the samples' tokens."""
    return column_of(forward(worker, setup, SAMPLES, weights=weights, outputs=(Output.LOGPROBS,)), SAMPLES)


def apart(one: Array, other: Array) -> float:
    return float(np.abs(one - other).max())


def test_the_reference_of_adapters_that_go_on_is_what_they_began_with(setup: Setup, tmp_path: Path) -> None:
    with running(setup) as worker:
        for number in range(3):
            train(worker, setup, number)
        started = passed(worker, setup)
        tensors = {each.name: each.view.clone() for each in worker.backend.local_state(StateKey.MASTER)}
    write_adapters(tmp_path / "adapters", tensors, peft_config(LORA, base=setup.model, targets=["all-linear"]))
    again = evolve(setup, lora=evolve(LORA, path=str(tmp_path / "adapters")))
    with running(again) as worker:
        worker.backend.load_snapshot(REFERENCE, "")
        assert apart(passed(worker, again), started) == 0.0
        for number in range(3):
            train(worker, again, number)
        assert apart(passed(worker, again), started) > 0.01
        assert apart(passed(worker, again, REFERENCE), started) == 0.0


def test_no_directory_can_be_the_reference_of_adapters(setup: Setup) -> None:
    with running(setup) as worker, pytest.raises(ModelError, match="has no tensor 'base_model.model"):
        worker.backend.load_snapshot(REFERENCE, setup.model)
