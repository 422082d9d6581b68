"""The class that prepares pictures for a tower, by the name in `model.pictures`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from corerl.pictures import PictureInputs
from corerl.plugin.registry import Kind, load, load_implementation

if TYPE_CHECKING:
    from corerl.config.schema import ModelConfig


def picture_inputs(model: ModelConfig) -> PictureInputs | None:
    """What prepares pictures for the tower of `model`, in a rank or an engine; None if the model is shown none. Raises
    PluginError if the reader that `model.pictures` names has none."""
    if not model.pictures:
        return None
    loaded = load(Kind.PICTURES, model.pictures)
    inputs: PictureInputs = load_implementation(Kind.PICTURES, loaded, loaded.spec.inputs, base=PictureInputs)(model)
    return inputs
