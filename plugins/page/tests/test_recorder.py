"""The extension, with the events of a run: what rollouts.jsonl has then."""

from __future__ import annotations

import json
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from corerl.config import CONFIG_FILE
from corerl.plugin import Evaluated, Event, RunRewound, RunStarted, StepFinished
from corerl_page.recorder import Recorder
from corerl_page.spec import PageOptions
from plugins.page.tests.batches import batch, shown

CONFIG = """
backend.name = "plain"
model.tokenizer = "characters:abcd"
model.config = { model_type = "qwen3", eos_token_id = 2 }
data.source = "sort-digits"
algorithm.old_logprobs = "recompute"
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_FILE).write_text(CONFIG)
    return tmp_path


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]


def started(run_dir: Path, first_step: int = 0) -> RunStarted:
    return RunStarted(run_dir=str(run_dir), steps=8, first_step=first_step, title="")


def step(number: int) -> StepFinished:
    return StepFinished(step=number, metrics={}, samples=shown(), batch=batch())


def record(run_dir: Path, *events: Event, **options: Any) -> None:
    recorder = Recorder(options=PageOptions(**options), run_dir=str(run_dir))
    for event in events:
        recorder.observe(event)
    recorder.shutdown("finished")


def test_a_line_has_the_samples_texts_and_tokens(run_dir: Path) -> None:
    record(run_dir, started(run_dir), Evaluated(step=0, metrics={}, shown=shown()[:1]), step(0), samples=0)
    found = lines(run_dir)
    assert [line["kind"] for line in found] == ["held-out", *["sampled"] * 4]
    assert [line["reward"] for line in found] == [0.0, 0.0, 0.25, 0.5, 0.75]
    assert "rows" not in found[0]
    assert [len(line["rows"]) for line in found[1:]] == [1, 1, 2, 1]
    assert found[1]["parts"] == {"form": 0.5}
    assert found[1]["rows"][0]["pieces"] == ["<pad>", "<bos>", "<eos>", "<unk>", "d"]  # ids 0, 1, 2, 3 and 7


def test_samples_are_kept_where_the_page_cannot_be_shown(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        record(run_dir, started(run_dir), step(0), serve=True, port=port)
    assert len(lines(run_dir)) == 4
    assert f"the run's page is not shown: cannot listen on 127.0.0.1 port {port}: " in capsys.readouterr().err


def test_the_versions_of_what_is_installed_are_kept(
    run_dir: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("site-packages")
    for name, metadata_ in {
        "left_over": "",
        "older_numpy": "Metadata-Version: 2.1\nName: numpy\nVersion: 0.1\n",
    }.items():
        (other / f"{name}-1.0.dist-info").mkdir()
        (other / f"{name}-1.0.dist-info" / "METADATA").write_text(metadata_)
    monkeypatch.setattr(sys, "path", [*sys.path, str(other)])
    record(run_dir, started(run_dir))
    found = json.loads((run_dir / "versions.json").read_text())
    assert found["Python"] == platform.python_version()
    assert all(found[name] == metadata.version(name) for name in ("corerl", "torch", "numpy"))


def test_only_some_samples_of_some_steps_are_kept(run_dir: Path) -> None:
    record(run_dir, started(run_dir), *map(step, range(5)), samples=2, every=3)
    assert [(line["step"], line["number"]) for line in lines(run_dir)] == [(0, 0), (0, 3), (3, 0), (3, 3)]


def test_repeated_steps_replace_what_was_kept(run_dir: Path) -> None:
    record(run_dir, started(run_dir), *map(step, range(4)), RunRewound(step=3), step(3), samples=1)
    assert [line["step"] for line in lines(run_dir)] == [0, 1, 2, 3]
    record(run_dir, started(run_dir, first_step=2), step(2), samples=1)
    assert [line["step"] for line in lines(run_dir)] == [0, 1, 2]
