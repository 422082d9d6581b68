"""The spec and options of the engine `transformers`; importing this loads neither torch nor transformers."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from corerl.config import at_least, option
from corerl.plugin import EngineSpec


@frozen(kw_only=True)
class TransformersConfig:
    """Options of the engine `transformers`."""

    batch_size: int = option("rows generated at once", default=512, validator=at_least(1))
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = option(
        "attention implementation of transformers; auto: sdpa if the model supports it, else eager", default="auto"
    )


SPEC = EngineSpec(
    implementation="corerl_transformers.engine:TransformersEngine",
    config=TransformersConfig,
    api=(2, 0),
    summary="transformers' own generate(), on CPU or GPU",
    adapters=True,
    pictures=True,
)
