"""What transformers' image processors do for a model: the size at which it sees a picture, the tokens that stand for
it, and what its tower takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from attrs import define
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.image_processing_auto import (
    IMAGE_PROCESSOR_MAPPING_NAMES,
    get_image_processor_class_from_name,
)

from corerl.config import ModelConfig
from corerl.errors import ModelError
from corerl.messages import one_line
from corerl.models import hf_config
from corerl.pictures import Picture, PictureInputs
from corerl.types import Array
from corerl_vision.tower import VisionTower

PLACEHOLDER = ("image_token_id", "image_token_index")  # fields of configs
BEGINS = ("boi_token_id", "boi_token_index")
ENDS = ("eoi_token_id", "eoi_token_index")
COUNTS = ("num_crops", "num_patches", "num_soft_tokens_per_image")  # of outputs that towers are not given
FIELDS = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size", "spatial_merge_size": "merge_size"}


@define(slots=False, eq=False)
class Processor:
    """The image processor of a model, in its version that needs no torchvision."""

    config: PreTrainedConfig
    own: Any  # the image processor
    placeholder: int
    begin: int | None  # the token that a template writes for a picture where that is another one

    def seen(self, pixels: Array) -> Array:
        """[H', W', 3] the picture as the tower sees it, before pixels are scaled. `prepared` of it is what the
        processor makes of `pixels`."""
        height, width = self._resized(*pixels.shape[:2])
        if pixels.shape[:2] == (height, width):
            return pixels
        resample = getattr(self.own, "resample", None)
        small = Image.fromarray(pixels).resize((width, height), resample=Image.Resampling(int(resample or 2)))
        return np.asarray(small)

    def prepared(self, pictures: Sequence[Array]) -> dict[str, Array]:
        """What `get_image_features` takes of pictures that are at their size."""
        made = [self._run(pixels, resize=False) for pixels in pictures]
        if len({each["pixel_values"].shape[1:] for each in made}) > 1 and made[0]["pixel_values"].ndim == 4:
            made = _padded(made)
        names = [name for name in made[0] if name not in COUNTS]
        return {name: np.concatenate([each[name] for each in made]) for name in names}

    @lru_cache(maxsize=1024)  # noqa: B019  -- one processor a model, for as long as the process lives
    def features(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of the features that the tower gives of a picture of this size; one row where nothing tells
        rows apart."""
        made = self._run(np.zeros((height, width, 3), np.uint8), resize=False)
        vision = self.config.vision_config
        if "image_grid_thw" in made:
            (_, rows, columns), merge = made["image_grid_thw"][0].tolist(), self.own.merge_size
            return 1, rows * columns // merge**2
        if "num_soft_tokens_per_image" in made:
            return 1, int(np.ravel(made["num_soft_tokens_per_image"])[0])
        if "image_sizes" in made:
            side = vision.patch_size * getattr(self.config, "spatial_merge_size", 1)
            return height // side, width // side
        if (fixed := getattr(self.config, "mm_tokens_per_image", None)) is not None:
            return 1, int(fixed)
        if (ratio := getattr(self.config, "downsample_ratio", None)) is not None:  # InternVL
            patch = vision.patch_size
            down, across = patch if isinstance(patch, list | tuple) else (patch, patch)
            return 1, int(height // down * ratio) * int(width // across * ratio)
        if (fixed := getattr(self.config, "image_seq_length", None)) is not None:
            return 1, int(fixed)
        raise ModelError(
            f"pictures of a {self.config.model_type} model cannot be shown: nothing says how many tokens one has"
        )

    @lru_cache(maxsize=1024)  # noqa: B019  -- as above; a run of the processor takes longer than the resizing itself
    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """(H, W) to which the processor resizes a picture of this size."""
        return self._size(self._run(np.zeros((height, width, 3), np.uint8), resize=True))

    def _size(self, made: Mapping[str, Array]) -> tuple[int, int]:
        """(H, W) of the one picture that this was made of."""
        if "image_grid_thw" in made:
            _, rows, columns = made["image_grid_thw"][0].tolist()
            return rows * self.own.patch_size, columns * self.own.patch_size
        if "image_sizes" in made:
            height, width = np.asarray(made["image_sizes"])[0].tolist()
            return height, width
        if "image_position_ids" in made:
            columns, rows = (made["image_position_ids"][0].max(axis=0) + 1).tolist()
            return rows * self.own.patch_size, columns * self.own.patch_size
        height, width = made["pixel_values"].shape[-2:]
        return height, width

    def _run(self, pixels: Array, *, resize: bool) -> dict[str, Array]:
        made = {
            name: np.asarray(value)
            for name, value in self.own(images=[Image.fromarray(pixels)], do_resize=resize, return_tensors="np").items()
        }
        if "image_grid_thw" not in made and len(made["pixel_values"]) != 1:
            raise ModelError(
                f"the image processor of {self.config.model_type} cuts a picture into {len(made['pixel_values'])} "
                "tiles, which CoreRL does not show; set crop_to_patches or do_pan_and_scan to false in its "
                "preprocessor_config.json"
            )
        return made


def _padded(made: Sequence[dict[str, Array]]) -> list[dict[str, Array]]:
    """Pictures [1, C, H, W] of several sizes, with zeros at the right and below up to the largest."""
    height, width = (max(each["pixel_values"].shape[axis] for each in made) for axis in (2, 3))
    padded = []
    for each in made:
        values = each["pixel_values"]
        grown = np.zeros((*values.shape[:2], height, width), values.dtype)
        grown[..., : values.shape[2], : values.shape[3]] = values
        padded.append({**each, "pixel_values": grown})
    return padded


def processor_of(model: ModelConfig, *, min_pixels: int = 0, max_pixels: int = 0) -> Processor:
    """The processor of a model's files, or of its type for a model from fields. Raises ModelError for a model whose
    pictures cannot be prepared."""
    config = hf_config(model)
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(config.model_type)
    name = names.get("pil") if isinstance(names, Mapping) else None
    placeholder = next((held for each in PLACEHOLDER if (held := getattr(config, each, None)) is not None), None)
    if name is None or placeholder is None or getattr(config, "vision_config", None) is None:
        lacks = "an image processor that runs without torchvision" if name is None else "a token for pictures"
        raise ModelError(f"pictures of a {config.model_type} model cannot be shown: it has no {lacks} in transformers")
    kind: Any = get_image_processor_class_from_name(name)
    try:
        own = kind.from_pretrained(model.path, local_files_only=True) if model.path else kind(**_fields(config))
    except Exception as error:  # each class raises what its own checks do
        raise ModelError(
            f"model.path={model.path!r}: its image processor cannot be made ({one_line(error)}); it needs the "
            "preprocessor_config.json that it was published with"
        ) from error
    if (merge := getattr(config, "spatial_merge_size", None)) is not None:  # Mistral's: whole features fit into a row
        side = config.vision_config.patch_size * merge
        own.patch_size = {"height": side, "width": side}
    if min_pixels or max_pixels:
        _limit(own, config, min_pixels, max_pixels)
    begin = next((held for each in BEGINS if (held := getattr(config, each, None)) is not None), None)
    return Processor(config, own, int(placeholder), begin)


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The sizes of a tower from fields, as its image processor names them."""
    vision = config.vision_config
    found = {ours: held for name, ours in FIELDS.items() if (held := getattr(vision, name, None)) is not None}
    side = getattr(vision, "image_size", None)
    side = side[0] if isinstance(side, list | tuple) else side
    if not side or "merge_size" in found:
        return found
    any_size = getattr(config, "spatial_merge_size", None) is not None
    return {**found, "size": {"longest_edge": side} if any_size else {"height": side, "width": side}}


def _limit(own: Any, config: PreTrainedConfig, least: int, most: int) -> None:
    size = dict(own.size or {})
    if size.keys() != {"longest_edge", "shortest_edge"}:
        raise ModelError(
            f"pictures.vision: min_pixels and max_pixels are of models with pictures of any size, but "
            f"{config.model_type} has the size {size or 'that its number of patches gives'}; remove them"
        )
    # GLM's processors count a picture as often as a temporal patch has frames.
    resize: Any = getattr(inspect.getmodule(type(own)), "smart_resize", None)
    frames = own.temporal_patch_size if resize and "num_frames" in inspect.signature(resize).parameters else 1
    own.size = {
        "shortest_edge": least * frames or size["shortest_edge"],
        "longest_edge": most * frames or size["longest_edge"],
    }


class VisionInputs(PictureInputs):
    """What towers take, by the image processor of the model."""

    def __init__(self, model: ModelConfig) -> None:
        self._processor = processor_of(model)
        self.placeholder = self._processor.placeholder

    def inputs(self, pictures: Sequence[Picture]) -> Mapping[str, Array]:
        return self._processor.prepared([picture.pixels for picture in pictures])

    def tower(self, decoder: PreTrainedModel, module: PreTrainedModel | None = None) -> VisionTower:
        return VisionTower(decoder, self, module)
