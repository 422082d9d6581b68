"""examples/plugins/command: `corerl best` finds the step, installed as its pyproject.toml says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from corerl.cli.main import main
from tests.examples.packages import put

VALUES = {0: 0.25, 1: 0.5, 2: None, 3: 0.75, 4: 0.5}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A run's directory; the example is installed."""
    monkeypatch.setattr(sys, "path", [str(put("command", tmp_path / "site")), *sys.path])
    rows = [{"step": step, "rollout/reward": value} for step, value in VALUES.items()]
    rows.insert(2, {"step": 1, "eval/reward": 0.125})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield str(tmp_path)
    del sys.modules["corerl_best"]


def test_the_largest_value_is_shown_with_its_step(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["best", run_dir]) == 0
    assert main(["best", run_dir, "--metric", "eval/reward"]) == 0
    assert capsys.readouterr() == ("step 3: rollout/reward 0.75\nstep 1: eval/reward 0.125\n", "")
    assert main(["best", run_dir, "--metric", "eval/rewrad"]) == 2
    said = f"corerl: error: {run_dir}: metrics.jsonl has no eval/rewrad; choose another --metric\n"
    assert capsys.readouterr() == ("", said)


def test_it_is_listed_with_its_summary(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "best the step at which a metric was largest" in " ".join(capsys.readouterr().out.split())
