"""What is prepared of a picture at its size is what transformers' processor makes of the picture itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers

from corerl.config import ModelConfig
from corerl.errors import ModelError
from corerl.pictures import Picture
from corerl.types import Array
from corerl_vision.processor import Processor, VisionInputs, processor_of
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


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_apart_are_prepared_as_together(family: str, tmp_path: Path) -> None:
    model = model_of(family, tmp_path)
    processor = processor_of(model)
    pictures = [processor.seen(noise(*size, seed=seed)) for seed, size in enumerate([(40, 56), (64, 64), (100, 30)])]
    wanted = processor.own(images=list(pictures), do_resize=False, return_tensors="np")
    found = VisionInputs(model).inputs([Picture(each) for each in pictures])
    assert "pixel_values" in found
    for name, values in found.items():
        np.testing.assert_array_equal(values, np.asarray(wanted[name]))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "mistral3", "gemma4"])
def test_features_are_as_many_as_the_family_writes(family: str, tmp_path: Path) -> None:
    processor = processor_of(model_of(family, tmp_path))
    for seed, (width, height) in enumerate(np.random.default_rng(1).integers(8, 90, size=(50, 2)).tolist()):
        seen = processor.seen(noise(width, height, seed=seed))
        made = processor.own(images=[seen], do_resize=False, return_tensors="np")
        rows, columns = processor.features(*seen.shape[:2])
        assert rows * columns == written(family, made, processor)


def written(family: str, made: Any, processor: Processor) -> int:
    """How many placeholders the family's own processor writes, by its code where that needs no torchvision."""
    if family == "mistral3":
        height, width = made["image_sizes"][0]
        side = processor.config.vision_config.patch_size * processor.config.spatial_merge_size
        return int((height // side) * (width // side))
    kinds = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "glm4v": "Glm4vProcessor", "gemma4": "Gemma4Processor"}
    try:
        kind = getattr(transformers, kinds.get(family, "Qwen3VLProcessor"))
    except ModuleNotFoundError as error:  # in transformers 5.12
        pytest.skip(f"this processor needs torchvision here: {error}")
    stand_in = SimpleNamespace(image_processor=processor.own, image_token="@", boi_token="", eoi_token="")
    return str(kind.replace_image_token(stand_in, made, 0)).count("@")
