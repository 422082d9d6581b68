"""What is prepared of a picture at its size is what transformers' processor makes of the picture itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from corerl.config import ModelConfig
from corerl.errors import ModelError
from corerl.types import Array
from corerl_vision.processor import processor_of
from tests.pictures import FAMILIES, pictures_config

SIZES = ((37, 52), (64, 64), (16, 90), (200, 31))  # (H, W)


def model_of(family: str, directory: Path) -> ModelConfig:
    pictures_config(family).save_pretrained(directory)
    return ModelConfig(config=json.loads((directory / "config.json").read_text()), pictures="vision", tower="trained")


def noise(width: int, height: int, seed: int) -> Array:
    """[H, W, 3]"""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("family", FAMILIES)
def test_resizing_first_gives_the_processors_own_values(family: str, tmp_path: Path) -> None:
    processor = processor_of(model_of(family, tmp_path))
    for height, width in SIZES:
        pixels = noise(width, height, seed=height)
        own = processor._run(pixels, resize=True)
        prepared = processor.prepared([processor.seen(pixels)])
        for name, values in prepared.items():
            np.testing.assert_array_equal(values, own[name])


def test_a_model_of_text_has_no_pictures() -> None:
    with pytest.raises(ModelError, match="pictures of a qwen2 model cannot be shown"):
        processor_of(ModelConfig(config={"model_type": "qwen2", "num_hidden_layers": 1}))
