"""What the probe says of the torch that it finds."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from corerl.plugin import Finding, Level
from corerl_fsdp import SPEC
from corerl_fsdp.probe import OLDEST

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def amiss() -> list[Finding]:
    return [finding for finding in SPEC.probe() if finding.level is not Level.OK]


def test_nothing_is_amiss_where_these_tests_run() -> None:
    assert amiss() == []


def test_the_oldest_torch_is_what_the_package_asks_for() -> None:
    dependencies = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    assert f"torch>={'.'.join(map(str, OLDEST))}" in dependencies


@pytest.mark.parametrize(
    ("version", "level", "fix"),
    [
        ("2.8.1+cu128", Level.ERROR, "python -m pip install 'torch>=2.9'"),
        ("3.0.0a0+git", Level.WARNING, "python -m pip install --upgrade corerl-fsdp"),
    ],
)
def test_another_torch_comes_with_what_mends_it(
    version: str, level: Level, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    (finding,) = amiss()
    assert (finding.level, finding.fix) == (level, fix)
    assert finding.what.startswith(f"torch {version} is ")


def test_what_ranks_meet_through_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    without = ["torch.distributed has no gloo", "torch sees CUDA devices, but torch.distributed has no NCCL"]
    assert [finding.what for finding in amiss()] == without
    monkeypatch.setattr(dist, "is_available", lambda: False)
    (finding,) = amiss()
    assert finding.what.endswith(" was built without torch.distributed")
