"""Against MLflow's own store of files: what is read back is what MLflow's pages would show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from mlflow import MlflowClient

from corerl.plugin import Event, RunFinished, StepFinished
from corerl_observe.mlflow_tracking import Mlflow
from corerl_observe.specs import MlflowOptions
from tests.observability.run import evaluated, metrics, started, steps, whole


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return (tmp_path / "store").as_uri()


def track(run_dir: Path, events: list[Event], uri: str, reason: str = "finished") -> None:
    options = MlflowOptions(tracking_uri=uri, experiment="sorting", tags={"team": "rl"}, samples_every=2)
    extension = Mlflow(options=options, run_dir=str(run_dir))
    for event in events:
        extension.observe(event)
    extension.shutdown(reason)


def runs(uri: str) -> list[Any]:
    client = MlflowClient(tracking_uri=uri)
    (experiment,) = [each for each in client.search_experiments() if each.name == "sorting"]
    return list(client.search_runs([experiment.experiment_id]))


def history(uri: str, run: Any, name: str) -> list[tuple[int, float]]:
    found = MlflowClient(tracking_uri=uri).get_metric_history(run.info.run_id, name)
    return sorted((point.step, point.value) for point in found)


def test_numbers_config_answers_and_the_end_are_read_back(tmp_path: Path, store: str) -> None:
    run_dir = tmp_path / "first"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text('[train]\nbetas = [0.9, 0.95]\n[engines."a b!"]\ntext = "' + 900 * "x" + '"\n')
    track(run_dir, list(whole(str(run_dir))), store)
    (run,) = runs(store)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.tags["team"] == "rl" and run.data.tags["corerl.title"] == "qwen3 on plain, fake engine"
    assert run.data.params == {"train.betas.0": "0.9", "train.betas.1": "0.95", "engines.a b_.text": 500 * "x"}
    for name in ("rollout/reward", "train/loss"):
        assert history(store, run, name) == [(step, metrics(step)[name]) for step in range(4)]
    assert history(store, run, "eval/exact_match") == [(0, 0.0), (2, 0.25), (4, 0.5)]
    client = MlflowClient(tracking_uri=store)
    samples = [each.path for each in client.list_artifacts(run.info.run_id, "samples")]
    names = [*(f"held-out-{step:08}" for step in (0, 2, 4)), *(f"rollout-{step:08}" for step in (0, 2))]
    assert samples == [f"samples/{name}.md" for name in names]
    text = Path(client.download_artifacts(run.info.run_id, samples[-1], str(tmp_path))).read_text()
    assert "| `35018>` | `01358` | `01358` | 1.000 |" in text


def test_only_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path, store: str) -> None:
    run_dir = tmp_path / "run"
    track(run_dir, [started(str(run_dir)), *steps(0, 3)], store, "failed")
    (run,) = runs(store)
    assert run.info.status == "FAILED"
    track(run_dir, [started(str(run_dir), first_step=2), *steps(2, 4), finished("interrupted")], store)
    (run,) = runs(store)
    assert run.info.status == "KILLED"
    assert [step for step, _ in history(store, run, "train/loss")] == [0, 1, 2, 2, 3]
    track(run_dir, [started(str(run_dir))], store)
    assert len(runs(store)) == 2
    track(run_dir, [evolve(started(str(run_dir), first_step=2), same_run=False)], store)
    assert len(runs(store)) == 3
    for step in (2, 4):  # scores of checkpoints, which lie elsewhere, are one curve
        scored = evolve(started(str(run_dir), first_step=step, mode="eval"), same_run=False)
        track(run_dir, [scored, evaluated(step)], store)
    assert len(runs(store)) == 3


def test_names_have_allowed_characters_and_runs_an_end(tmp_path: Path, store: str) -> None:
    told = StepFinished(step=0, metrics={"reward/f:x(1)": 2.0})
    track(tmp_path / "run", [started(str(tmp_path / "run")), told], store)
    (run,) = runs(store)
    assert history(store, run, "reward/f_x_1_") == [(0, 2.0)]
    assert run.info.status == "FINISHED"


def finished(reason: str) -> RunFinished:
    return RunFinished(reason=reason, steps_done=4, seconds=1.0)


def test_without_a_uri_the_store_is_in_the_runs_directory(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track(tmp_path, [started(str(tmp_path)), finished("finished")], "")
    assert [run.info.status for run in runs((tmp_path / "mlruns").as_uri())] == ["FINISHED"]
