"""A run without any wheel but core, and those that have the plain backend, its engine and the transport over a disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from corerl.errors import UserError
from corerl.messages import install_hint
from corerl.plan.make import make_plan
from corerl.plugin import registry
from tests.in_process import small

THERE = {"corerl", "corerl-testing", "corerl-transformers", "corerl-delta"}
DRAWING = ["corerl_observe", "matplotlib", "rich", "tensorboard"]


@pytest.mark.parametrize(
    ("override", "unknown", "installed", "extra"),
    [
        ("extensions=[{name='curves'}]", "extensions[0].name: unknown extension 'curves'", "jsonl", "observe"),
        ("extensions=[{name='wandb'}]", "extensions[0].name: unknown extension 'wandb'", "jsonl", "wandb"),
        ("extensions=[{name='mlflow'}]", "extensions[0].name: unknown extension 'mlflow'", "jsonl", "mlflow"),
        ("algorithm.name=dapo", "algorithm.name: unknown algorithm 'dapo'", "grpo", "algorithms"),
        ("weights.transport=auto", "weights.transport: unknown transport 'ipc'", "delta, disk", "transports"),
    ],
)
def test_a_plugin_that_is_not_installed_names_its_extra(
    override: str, unknown: str, installed: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = registry.scan  # no other distribution has entry points, and what draws cannot be imported
    found = {kind: [entry for entry in scan(kind) if entry.distribution in THERE] for kind in registry.Kind}
    monkeypatch.setattr(registry, "scan", found.__getitem__)
    for name in [*DRAWING, *(each for each in sys.modules if each.partition(".")[0] in DRAWING)]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as caught:
        make_plan(small(tmp_path, override))
    name = unknown.rpartition(" ")[2]
    assert caught.value.message == (f"{unknown}; installed: {installed}; to install {name}: {install_hint(extra)}")
