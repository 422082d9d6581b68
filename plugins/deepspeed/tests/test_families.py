"""Models of families that differ in their layers move between backends and world sizes, and their exports are what was
trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from corerl.config import LoraConfig
from corerl_testing import Runs, assert_follows, drawn_model, smallest_config
from tests.checkpoint.moves import Place
from tests.pictures import write_pictures

FSDP: Place = ("fsdp", {}, 2)
ZERO3: Place = ("deepspeed", {"stage": 3}, 2)


@pytest.mark.parametrize("place", [FSDP, ZERO3])
def test_adapters_of_a_model_with_pictures_follow_the_plain_backend(runs: Runs, tmp_path: Path, place: Place) -> None:
    lora = LoraConfig(rank=4, alpha=8.0).settled({})
    family_runs = Runs(runs.rank_sets, {"mistral3": write_pictures("mistral3", tmp_path / "model")})
    backend, options, ranks = place
    setup = evolve(family_runs.setup(backend, "mistral3"), options=options, lora=lora)
    plain = evolve(family_runs.setup("plain", "mistral3"), lora=lora)
    assert_follows(family_runs.train(ranks, setup, range(2)), family_runs.train(1, plain, range(2)))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_weight_that_no_pass_reads_does_not_decay(runs: Runs, tmp_path: Path, stage: int) -> None:
    model = tmp_path / "model"
    drawn_model(smallest_config("bart")).save_pretrained(model)  # whose attention to an encoder has nothing to see
    family_runs = Runs(runs.rank_sets, {"bart": model})
    setup = evolve(family_runs.setup("deepspeed", "bart"), options={"stage": stage})
    found = family_runs.train(2, setup, range(2))
    assert_follows(found, family_runs.train(1, family_runs.setup("plain", "bart"), range(2)))
