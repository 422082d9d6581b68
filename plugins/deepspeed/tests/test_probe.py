"""What the probe says of the DeepSpeed that it finds."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from corerl.plugin import Finding, Level
from corerl_deepspeed import SPEC
from corerl_deepspeed.probe import END, OLDEST

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def amiss() -> list[Finding]:
    return [finding for finding in SPEC.probe() if finding.level is not Level.OK]


def test_nothing_is_amiss_where_these_tests_run() -> None:
    assert amiss() == []


def test_the_versions_are_those_that_the_package_asks_for() -> None:
    dependencies = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    oldest, end = (".".join(map(str, version)) for version in (OLDEST, END))
    assert f"deepspeed>={oldest},<{end}" in dependencies


@pytest.mark.parametrize("version", ["0.18.3", "0.19.7", "0.20.0+cu130"])
def test_another_version_comes_with_what_mends_it(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    (finding,) = amiss()
    assert (finding.level, finding.fix) == (Level.ERROR, "python -m pip install 'deepspeed>=0.19.8,<0.20'")
    assert finding.what.startswith(f"DeepSpeed {version} is not supported by this backend")


def test_operations_are_told_and_none_is_compiled() -> None:
    (finding,) = [each for each in SPEC.probe() if each.what.startswith("DeepSpeed operations")]
    assert "already built: none" in finding.what and "cpu_adam" in finding.what
