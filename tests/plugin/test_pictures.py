from __future__ import annotations

import pytest
from attrs import evolve

from corerl.config.schema import ModelConfig
from corerl.errors import PluginBroken, PluginNotFound
from corerl.pictures import PictureReader
from corerl.plugin.pictures import picture_inputs
from corerl.plugin.registry import Kind, load, load_implementation
from tests.tiny_pictures import SPEC, TinyInputs

SWAPPED = evolve(SPEC, implementation=SPEC.inputs, inputs=SPEC.implementation)


def test_both_classes_are_found_by_the_readers_name() -> None:
    assert isinstance(picture_inputs(ModelConfig(pictures="tests.tiny_pictures:SPEC")), TinyInputs)
    assert picture_inputs(ModelConfig()) is None
    with pytest.raises(PluginNotFound, match="unknown reader 'visoin'; .*did you mean 'vision'"):
        picture_inputs(ModelConfig(pictures="visoin"))


def test_a_class_of_the_other_kind_is_refused() -> None:
    name = "tests.plugin.test_pictures:SWAPPED"
    with pytest.raises(PluginBroken, match="TinyReader is .*, wanted a subclass of corerl.pictures.PictureInputs"):
        picture_inputs(ModelConfig(pictures=name))
    with pytest.raises(PluginBroken, match="TinyInputs is .*, wanted a subclass of corerl.pictures.PictureReader"):
        load_implementation(Kind.PICTURES, load(Kind.PICTURES, name), base=PictureReader)
