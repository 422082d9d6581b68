"""Models of families that differ in their layers move between backends and world sizes, and their exports are what was
trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from corerl.checkpoint.format import WEIGHTS
from corerl.checkpoint.reader import CheckpointSource
from corerl.config.schema import ModelConfig
from corerl.models.config import hf_config
from corerl.models.export import export_directory
from corerl.models.smallest import smallest_config
from corerl.testing.compare import same_bits, saved_tensors
from corerl.testing.models import drawn_model
from corerl.testing.subject import Runs
from tests.checkpoint.moves import Place, assert_moving_follows_staying

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
    model, exported, again = (str(tmp_path / name) for name in ("model", "export", "again"))
    drawn_model(smallest_config(model_type)).save_pretrained(model)
    family = Runs(runs.rank_sets, {model_type: Path(model)})
    last = assert_moving_follows_staying(family, tmp_path, model_type, PLACES[model_type])
    trained = saved_tensors(CheckpointSource(Path(last), *WEIGHTS))
    tensors = ((name, torch.from_numpy(values)) for name, values in trained.items())
    export_directory(exported, config=hf_config(ModelConfig(path=model)), tokenizer=None, tensors=tensors)
    AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).save_pretrained(again)
    loaded = load_file(Path(again) / "model.safetensors")
    assert loaded.keys() == trained.keys()
    assert [name for name, values in trained.items() if not same_bits(loaded[name], values)] == []
