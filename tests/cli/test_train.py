"""`corerl train`, up to the loop; what the loop does is tested in tests/end_to_end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from corerl import loop
from corerl.cli.main import main
from corerl.config.schema import Config

SOUND = 'backend.name = "plain"\nrun.steps = 5\n'


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that the loop was started with."""
    configs: list[Config] = []
    monkeypatch.setattr(loop, "train", lambda config, *, forks: configs.append(config))
    return configs


def test_the_loop_gets_the_file_with_overrides(
    trained: list[Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(SOUND)
    arguments = ["algorithm.entropy_coef=0.28", "run.seed=1", "run.seed=2"]
    assert main(["train", str(tmp_path / "run.toml"), *arguments]) == 0
    (config,) = trained
    assert (config.run.steps, config.run.seed, config.algorithm.entropy_coef) == (5, 2, 0.28)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_line_before_long_imports(
    trained: list[Config], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(SOUND)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["train", str(tmp_path / "run.toml")]) == 0
    assert capsys.readouterr().err == "corerl: loading torch, transformers and plugins\n"


def test_modules_in_the_working_directory_can_be_imported(
    trained: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(SOUND)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "run.toml"]) == 0
    assert sys.path[-1] == str(tmp_path)
