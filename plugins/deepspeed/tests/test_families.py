"""Models of families that differ in their layers move between backends and world sizes, and their exports are what was
trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from corerl.checkpoint import CheckpointSource
from corerl.config import LoraConfig
from corerl_testing import WEIGHTS, Runs, assert_follows, drawn_model, smallest_config
from tests.checkpoint.moves import Place, assert_export_is_what_transformers_loads, assert_moving_follows_staying
from tests.pictures import of_pictures, tensors_in, write_pictures

FSDP: Place = ("fsdp", {}, 2)
ZERO2: Place = ("deepspeed", {"stage": 2}, 1)
ZERO3: Place = ("deepspeed", {"stage": 3}, 2)
PLAIN: Place = ("plain", {}, 1)
PLACES: dict[str, list[Place]] = {
    "gemma3_text": [FSDP, ZERO2],  # windows
    "gpt_oss": [ZERO3, PLAIN],  # windows, sinks, experts
    "glm4_moe": [FSDP, ZERO3],  # weights in buffers
    "qwen3_5_text": [ZERO3, FSDP],  # gated delta nets
}


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", PLACES)
def test_a_run_goes_on_elsewhere_and_its_export_is_what_transformers_loads(
    runs: Runs, tmp_path: Path, model_type: str
) -> None:
    model = tmp_path / "model"
    drawn_model(smallest_config(model_type)).save_pretrained(model)
    family = Runs(runs.rank_sets, {model_type: model})
    last = assert_moving_follows_staying(family, tmp_path, model_type, PLACES[model_type])
    assert_export_is_what_transformers_loads(model, last, tmp_path)


OF_TEXT: dict[str, list[Place]] = {  # families that read pictures
    "qwen3_vl": [FSDP, ZERO3],
    "qwen3_5": [ZERO3, PLAIN],
    "gemma3": [ZERO2, FSDP],
    "mistral3": [FSDP, ZERO2],
}


@pytest.mark.nightly
@pytest.mark.parametrize("family", OF_TEXT)
def test_the_text_of_a_model_that_reads_pictures_goes_on_elsewhere(runs: Runs, tmp_path: Path, family: str) -> None:
    family_runs = Runs(runs.rank_sets, {family: write_pictures(family, tmp_path / "model")})
    last = assert_moving_follows_staying(family_runs, tmp_path, family, OF_TEXT[family])
    names = tensors_in(tmp_path / "model").keys()
    for kind in ("exp_avg", *WEIGHTS[:1]):
        assert CheckpointSource(Path(last), kind).shapes.keys() == {name for name in names if not of_pictures(name)}


@pytest.mark.parametrize("place", [FSDP, ZERO2, ZERO3])
def test_adapters_of_a_model_that_reads_pictures_follow_the_plain_backend(
    runs: Runs, tmp_path: Path, place: Place
) -> None:
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
