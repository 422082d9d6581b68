from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import attrs
import pytest

from corerl.observability import specs
from corerl.plugin.spec import ExtensionSpec

ALL = [specs.CONSOLE, specs.JSONL, specs.TENSORBOARD, specs.CURVES, specs.TRACE]


def test_listing_the_extensions_loads_no_heavy_library() -> None:
    code = (
        "import sys, corerl.observability.specs\n"
        "print(sorted({'torch', 'rich', 'matplotlib', 'tensorboard', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.implementation)
def test_each_spec_names_a_class_that_its_default_options_construct(spec: ExtensionSpec, tmp_path: object) -> None:
    module, name = spec.implementation.split(":")
    extension = getattr(import_module(module), name)(options=spec.config(), run_dir=str(tmp_path))
    assert extension.observe.corerl_impl["wrapper"] is False
    assert all(field.metadata["help"] for field in attrs.fields(spec.config))


def test_an_interval_below_its_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="'every' must be >= 1: 0"):
        specs.ConsoleOptions(every=0)
