"""The two classes of a reader of pictures, by the name in `model.pictures`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from corerl.errors import PluginBroken
from corerl.pictures import PictureInputs, PictureReader
from corerl.plugin.registry import Kind, Loaded, load, load_implementation

if TYPE_CHECKING:
    from corerl.config.schema import ModelConfig


def reader_class(loaded: Loaded) -> type[PictureReader]:
    """What reads pictures in the driver. Raises PluginBroken if it is no reader."""
    found: type[PictureReader] = _subclass(loaded, loaded.spec.implementation, PictureReader)
    return found


def picture_inputs(model: ModelConfig) -> PictureInputs | None:
    """What prepares pictures for the tower of `model`, in a rank or an engine; None if the model is shown none. Raises
    PluginError if the reader that `model.pictures` names has none."""
    if not model.pictures:
        return None
    loaded = load(Kind.PICTURES, model.pictures)
    inputs: PictureInputs = _subclass(loaded, loaded.spec.inputs, PictureInputs)(model)
    return inputs


def _subclass(loaded: Loaded, code: str, wanted: type) -> Any:
    found = load_implementation(Kind.PICTURES, loaded, code)
    if not (isinstance(found, type) and issubclass(found, wanted)):
        raise PluginBroken(
            f"reader {loaded}: {code} is {found!r}, wanted a subclass of corerl.pictures.{wanted.__name__}"
        )
    return found
