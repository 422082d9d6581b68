"""What the entry points name: the reader of pictures, and a sampler that brings generated ones; imports no torch."""

from __future__ import annotations

from attrs import frozen

from corerl.config import above, at_least, option
from corerl.plugin import PicturesSpec, SamplerSpec
from corerl_vision.shapes import ShapesOptions, rows


@frozen(kw_only=True)
class VisionOptions:
    """Where a row's pictures are, and which are read."""

    key: str = option("the field of a row that has its pictures: one, or a list", default="images")
    root: str = option("the directory that paths are in; empty: that of the data's files", default="")
    min_pixels: int = option(
        "pixels of the smallest picture that the tower is shown, for models with pictures of any size; smaller ones "
        "are enlarged. 0: what the model's files say",
        default=0,
        validator=at_least(0),
    )
    max_pixels: int = option(
        "pixels of the largest one, likewise; larger ones are reduced. 0: what the model's files say",
        default=0,
        validator=at_least(0),
    )
    max_megabytes: float = option("size of a file above which it is refused", default=64.0, validator=above(0))
    max_megapixels: float = option(
        "decoded size above which a picture is refused, by the beginning of its file", default=100.0, validator=above(0)
    )


SPEC = PicturesSpec(
    implementation="corerl_vision.reader:VisionReader",
    inputs="corerl_vision.processor:VisionInputs",
    config=VisionOptions,
    api=(2, 0),
    summary="reads picture files, by the image processors of transformers",
)
COUNT_SHAPES = SamplerSpec(
    implementation="corerl.rollout:PromptSampler",
    config=ShapesOptions,
    prompts=rows,
    api=(2, 0),
    summary="asks how many of a generated picture's shapes are of one kind",
)
