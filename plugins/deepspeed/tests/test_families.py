"""Models of families that differ in their layers move between backends and world sizes, and their exports are what was
trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl.testing import Runs, drawn_model, smallest_config
from tests.checkpoint.moves import Place, assert_export_is_what_transformers_loads, assert_moving_follows_staying

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


@pytest.mark.parametrize("model_type", PLACES)
def test_a_run_goes_on_elsewhere_and_its_export_is_what_transformers_loads(
    runs: Runs, tmp_path: Path, model_type: str
) -> None:
    model = tmp_path / "model"
    drawn_model(smallest_config(model_type)).save_pretrained(model)
    family = Runs(runs.rank_sets, {model_type: model})
    last = assert_moving_follows_staying(family, tmp_path, model_type, PLACES[model_type])
    assert_export_is_what_transformers_loads(model, last, tmp_path)
