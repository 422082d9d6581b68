from __future__ import annotations

from importlib import import_module

import attrs
import pytest

from corerl.observability import specs
from corerl.plugin.spec import ExtensionSpec, Process


@pytest.mark.parametrize("spec", [specs.CONSOLE, specs.JSONL], ids=lambda spec: spec.implementation)
def test_each_spec_names_a_class_that_its_default_options_construct(spec: ExtensionSpec, tmp_path: object) -> None:
    module, name = spec.implementation.split(":")
    extension = getattr(import_module(module), name)(options=spec.config(), run_dir=str(tmp_path))
    assert callable(extension.observe)
    assert (spec.process, spec.joins) == (Process.DRIVER, "default")
    assert all(field.metadata["help"] for field in attrs.fields(spec.config))
