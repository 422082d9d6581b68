"""`corerl eval`, up to the evaluation: which weights, and where scores go; what is scored is in tests/end_to_end."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl import loop
from corerl.checkpoint.reader import CheckpointSource
from corerl.cli.main import main
from corerl.config.load import dump_toml
from corerl.config.schema import Config
from corerl.driver.run import Summary
from tests.driver.saved import make_config, make_model, save


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that were evaluated."""
    configs: list[Config] = []

    def evaluate(config: Config) -> Summary:
        if config.checkpoint.resume != "never":  # as ranks do
            CheckpointSource(Path(config.checkpoint.resume) / "actor", "master").verify(rank=0, world_size=1)
        configs.append(config)
        return Summary(reason="finished", run_dir=Path(config.run.dir), steps_done=4, evaluation={"reward": 0.5})

    monkeypatch.setattr(loop, "train", evaluate)
    return configs


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of a run that was moved since."""
    config = make_config(run={"dir": "somewhere/else"})
    return save(tmp_path / "run", config, make_model(config, seed=1), step=4)


def test_scores_go_to_the_run_dir_that_is_given(
    evaluated: list[Config], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(checkpoint), "--json", f"run.dir={tmp_path / 'mine'}"]) == 0
    assert (evaluated[0].run.dir, evaluated[0].extensions) == (str(tmp_path / "mine/eval"), ())
    assert capsys.readouterr().out == '{"reward": 0.5}\n'


def test_how_a_run_samples_for_training_is_refused_here(
    evaluated: list[Config], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for setting in ("samples", "temperature", "top_p", "top_k"):
        assert main(["eval", str(checkpoint), f"rollout.{setting}=2"]) == 2
        told = f"corerl: error: rollout.{setting}: has no effect on evaluation; set eval.{setting}\n"
        assert capsys.readouterr().err == told
    assert main(["eval", str(checkpoint), "eval.samples=8", "eval.temperature=0.8", "rollout.max_tokens=3"]) == 0
    (config,) = evaluated
    settled = config.eval.settled(config.eval, config.rollout)
    assert (settled.samples, settled.temperature, settled.max_tokens) == (8, 0.8, 3)


def test_a_file_is_scored_with_its_runs_newest_weights(
    evaluated: list[Config], checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(make_config(run={"dir": str(tmp_path / "run")})))
    for resume in ("auto", "never"):
        assert main(["eval", str(file), f"checkpoint.resume={resume}"]) == 0
    assert [config.checkpoint.resume for config in evaluated] == [str(checkpoint), "never"]
    assert {config.run.dir for config in evaluated} == {str(tmp_path / "run/eval")}


@pytest.mark.parametrize("whole", [True, False])
def test_a_damaged_checkpoint_falls_back_to_an_earlier_one(
    evaluated: list[Config], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: bool
) -> None:
    config = make_config(run={"dir": str(tmp_path / "run")})
    damaged = save(tmp_path / "run", config, make_model(config, seed=1), step=9)
    for each in (damaged,) if whole else (damaged, checkpoint):
        (each / "actor/rank-00000.safetensors").unlink()
    (tmp_path / "run.toml").write_text(dump_toml(config))
    for what, *more in ([str(tmp_path / "run.toml"), "checkpoint.resume=auto"], [str(tmp_path / "run")]):
        assert main(["eval", what, *more]) == (0 if whole else 2)
        told = capsys.readouterr().err
        if whole:
            assert told.startswith(f"corerl: skipping {damaged.name}, using {checkpoint.name}: {damaged}/actor/rank-")
        else:
            line = f"corerl: error: {tmp_path / 'run'} is a run directory without an intact checkpoint: {damaged}"
            assert told.splitlines()[-1].startswith(line)
        assert "rank-00000.safetensors is missing" in told
    assert [each.checkpoint.resume for each in evaluated] == [str(checkpoint)] * 2 * whole


def test_a_missing_run_is_no_missing_file(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = checkpoint.parent.parent
    missing = run_dir.with_name("rnu")
    assert main(["eval", str(missing)]) == 2
    assert capsys.readouterr().err == (
        f"corerl: error: no checkpoint at {missing}, which does not exist; did you mean '{run_dir}'?\n"
    )
    assert main(["eval", f"{missing}.toml"]) == 2
    assert capsys.readouterr().err == f"corerl: error: {missing}.toml: no such file; pass the path of a TOML file\n"


def test_a_removed_checkpoint_is_no_missing_file(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = checkpoint.with_name("step-00000002")
    assert main(["eval", str(gone)]) == 2
    assert capsys.readouterr().err == (
        f"corerl: error: no checkpoint at {gone}: the run that writes there keeps only its newest checkpoints "
        f"(checkpoint.keep); use one that still exists, such as {checkpoint}\n"
    )
