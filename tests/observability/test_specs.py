from __future__ import annotations

from importlib import import_module

import attrs

from corerl.observability import specs
from corerl.plugin.spec import Process


def test_the_spec_names_a_class_that_its_default_options_construct(tmp_path: object) -> None:
    spec = specs.JSONL
    module, name = spec.implementation.split(":")
    extension = getattr(import_module(module), name)(options=spec.config(), run_dir=str(tmp_path))
    assert callable(extension.observe)
    assert (spec.process, spec.joins) == (Process.DRIVER, "default")
    assert all(field.metadata["help"] for field in attrs.fields(spec.config))
