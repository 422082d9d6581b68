"""A run without any wheel but core, and those that have the plain backend, its engine and the transport over a disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from attrs import evolve

from corerl.config.schema import ExtensionChoice
from corerl.errors import UserError
from corerl.plan.make import make_plan
from corerl.plugin import registry
from tests.in_process import small

THERE = {"corerl", "corerl-testing", "corerl-transformers", "corerl-delta"}
DRAWING = ["corerl_observe", "matplotlib", "rich", "tensorboard"]


@pytest.fixture(autouse=True)
def core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other distribution has entry points, and what draws cannot be imported."""
    scan = registry.scan
    found = {kind: [entry for entry in scan(kind) if entry.distribution in THERE] for kind in registry.Kind}
    monkeypatch.setattr(registry, "scan", found.__getitem__)
    for name in [*DRAWING, *(each for each in sys.modules if each.partition(".")[0] in DRAWING)]:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("name", "extra"), [("curves", "observe"), ("nan-guard", "observe"), ("wandb", "wandb"), ("mlflow", "mlflow")]
)
def test_an_extension_that_is_not_installed_names_its_extra(tmp_path: Path, name: str, extra: str) -> None:
    config = evolve(small(tmp_path), extensions=(ExtensionChoice(name=name),))
    with pytest.raises(UserError) as caught:
        make_plan(config)
    assert caught.value.message == (
        f"extensions[0].name: unknown extension {name!r}; installed: jsonl; to install {name!r}: "
        f"pip install 'corerl[{extra}]'"
    )


def test_an_algorithm_that_is_not_installed_names_its_extra(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        make_plan(small(tmp_path, "algorithm.name=dapo"))
    assert caught.value.message == (
        "algorithm.name: unknown algorithm 'dapo'; installed: grpo; to install 'dapo': pip install 'corerl[algorithms]'"
    )


def test_a_transport_that_is_not_installed_names_its_extra(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        make_plan(small(tmp_path, "weights.transport=auto"))
    assert caught.value.message == (
        "weights.transport: unknown transport 'ipc'; installed: delta, disk; to install 'ipc': "
        "pip install 'corerl[transports]'"
    )
