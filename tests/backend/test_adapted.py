"""What the base class makes of a role that trains adapters: its reference is the model, of which no copy is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from attrs import evolve

from corerl.config.schema import LoraConfig
from corerl.errors import ModelError
from corerl_testing.harness import Setup, running

LORA = LoraConfig(rank=3, alpha=7.0).settled({})
REFERENCE = "reference"


@pytest.fixture
def setup(model_directories: Mapping[str, Path]) -> Setup:
    base = Setup(backend="plain", model=str(model_directories["qwen3-tied"]), lora=LORA)
    # Not clipped, so that three steps change the log-probs by much more than rounding.
    return evolve(base, train=evolve(base.train, optimizer=evolve(base.train.optimizer, clip_norm=None)))


def test_no_directory_can_be_the_reference_of_adapters(setup: Setup) -> None:
    with running(setup) as worker, pytest.raises(ModelError, match="has no tensor 'base_model.model"):
        worker.backend.load_snapshot(REFERENCE, setup.model)
