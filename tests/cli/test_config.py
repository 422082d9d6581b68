"""`corerl config check|show`, from the command line to what is printed."""

import importlib
import tomllib
from pathlib import Path

import pytest

from corerl.cli.main import main
from corerl.config.load import load_config

SOUND = """
extensions = []
[backend]
name = "plain"
[model]
tokenizer = "characters:0123456789>"
[model.config]
model_type = "qwen3"
[rollout]
engine = "fake"
"""


@pytest.fixture
def sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)  # where run.dir is, and modules beside the run
    path = tmp_path / "run.toml"
    path.write_text(SOUND)
    return str(path)


def test_check_says_all_that_train_would_say(sound: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        "reward.name=exakt",
        "data.source=nope",
        "algorithm.loss=cliped",
        "rollout.stop=['two words']",
    ]
    assert main(["config", "check", sound, *wrong]) == 2
    out, checked = capsys.readouterr()
    lines = [line.removeprefix("corerl: error: ") for line in checked.splitlines()]
    beginnings = (
        "algorithm.loss: unknown loss 'cliped'",
        "data.source: unknown source 'nope'",
        "reward.name: unknown reward 'exakt'",
        "rollout.stop: 'two words' is ['<unk>'",
    )
    assert out == ""
    pairs = zip(sorted(lines), beginnings, strict=True)
    assert [line for line, beginning in pairs if not line.startswith(beginning)] == []
    importlib.import_module("corerl.loop")  # which `train` would do, and start Ray meanwhile
    assert main(["train", sound, *wrong]) == 2
    assert capsys.readouterr() == ("", checked)


def test_check_notes_a_table_that_it_cannot_check_once(
    sound: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "12>", "answer": "{n}"}}\n' for n in range(20)))
    data = [f"data.source={tmp_path}/rows.jsonl", "data.held_out=2"]
    assert main(["config", "check", sound, *data, "backends.not_installed.x=1"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{sound}: ok\n"
    table, repeated = err.splitlines()
    assert table.startswith("corerl: note: backends.not_installed is ignored: ")
    assert repeated == "corerl: note: data.held_out: 2 of 2 held-out prompts are prompts of training rows too"


def test_show_prints_a_valid_input_that_resolves_to_itself(
    sound: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", sound, "algorithms.grpo.clip_high=0.28", "backends.not_installed.x=1"]) == 0
    shown = capsys.readouterr().out
    again = tmp_path / "again.toml"
    again.write_text(shown)
    config = load_config(again)
    assert config.algorithms["grpo"]["clip_high"] == 0.28
    assert config.train == load_config(sound).train
    assert config.backends["not_installed"] == {"x": 1}
    assert "plain" in config.backends and "fake" in config.engines  # every option of what is selected
    assert main(["config", "show", str(again)]) == 0
    assert capsys.readouterr().out == shown


def test_options_of_a_file_explain_each_setting(sound: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", sound]) == 0
    bare = capsys.readouterr().out
    assert main(["options", sound]) == 0
    explained = capsys.readouterr().out
    assert tomllib.loads(explained) == tomllib.loads(bare)
    assert "# weight of the entropy bonus (number)\nentropy_coef = 0.0\n" in explained
