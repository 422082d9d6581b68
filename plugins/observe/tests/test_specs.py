from __future__ import annotations

import sys
from importlib import import_module
from inspect import isgeneratorfunction
from pathlib import Path

import attrs
import pytest

from corerl.config import ClusterInfo
from corerl.messages import install_hint
from corerl.plugin import ExtensionSpec, Process
from corerl_observe import specs

DRIVERS = [specs.TENSORBOARD, specs.CURVES, specs.TRACE, specs.WANDB, specs.MLFLOW]
WORKERS = [specs.HOOKS, specs.PROFILER, specs.MEMORY, specs.NAN_GUARD]
CLUSTER = ClusterInfo(device="cpu", ranks=2)


@pytest.mark.parametrize("spec", DRIVERS + WORKERS, ids=lambda spec: spec.implementation)
def test_each_spec_names_a_class_that_its_default_options_construct(spec: ExtensionSpec, tmp_path: object) -> None:
    module, name = spec.implementation.split(":")
    extension = getattr(import_module(module), name)(options=spec.config(), run_dir=str(tmp_path))
    hook = extension.observe if spec in DRIVERS else extension.optimizer_step
    assert isgeneratorfunction(hook) is (spec in WORKERS)
    assert spec.process is (Process.WORKER if spec in WORKERS else Process.DRIVER)
    assert all(field.metadata["help"] for field in attrs.fields(spec.config))


def test_a_trackers_directory_is_not_taken_for_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (problem,) = specs.WANDB.check(specs.WandbOptions(), CLUSTER)
    assert problem.text == f"the package 'wandb' is not installed; {install_hint('wandb')}"
