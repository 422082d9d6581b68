"""Every example with one thing in it wrong: a line with the path of that thing, exit status 2, never a traceback."""

from __future__ import annotations

import copy
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from corerl.cli.main import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PATH = re.compile(r"corerl: error: ([a-z_]+(?:[.\[][\w.\[\]]+)?)")

Keys = tuple[str, ...]


def example(name: str) -> dict[str, Any]:
    return tomllib.loads((EXAMPLES / name).read_text())


def leaves(table: dict[str, Any], keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, (*keys, key))
        else:
            yield (*keys, key), value


def changed(data: dict[str, Any], keys: Keys, value: Any, *, key: str = "") -> dict[str, Any]:
    """A copy with another value there, under another `key` if one is given."""
    data = copy.deepcopy(data)
    table = data
    for name in keys[:-1]:
        table = table[name]
    del table[keys[-1]]
    table[key or keys[-1]] = value
    return data


def mutations() -> Iterator[Any]:
    """(example, data, path that a line must begin with)."""
    for name in sorted(path.name for path in EXAMPLES.glob("*.toml")):
        data = example(name)
        for keys, value in leaves(data):
            if keys[:2] == ("model", "config"):
                continue  # transformers' own fields: below
            if keys[:3] == ("samplers", "episodes", "options"):
                continue  # the user's function's own, which alone knows what it takes
            path = ".".join(keys)
            wrong = {"not": "this"} if not isinstance(value, str) else [1]
            yield pytest.param(changed(data, keys, wrong), path, id=f"{name} {path} of another type")
            misspelt = keys[-1][:-1] + ("q" if keys[-1][-1] != "q" else "z")
            misspelt_path = ".".join((*keys[:-1], misspelt))
            yield pytest.param(changed(data, keys, value, key=misspelt), misspelt_path, id=f"{name} {path} misspelt")


def check(tmp_path: Path, data: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of `corerl config check`, which must refuse."""
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(data))
    assert main(["config", "check", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err.splitlines()


@pytest.fixture(autouse=True)
def same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command puts the working directory there


@pytest.mark.parametrize(("data", "path"), list(mutations()))
def test_a_wrong_type_and_an_unknown_key_have_their_line(
    data: dict[str, Any], path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = check(tmp_path, data, capsys)
    told = [match[1] for line in lines if (match := PATH.match(line))]
    assert len(told) == len(lines), lines
    assert any(each == path or each.startswith(f"{path}.") for each in told), lines


@pytest.mark.parametrize(
    ("keys", "value", "path"),
    [
        (("backend", "name"), "fspd", "backend.name"),
        (("roles", "actor", "ranks"), 0, "roles.actor.ranks"),
        (("roles", "critic"), {"ranks": 1}, "roles.critic"),
        (("run", "steps"), -1, "run.steps"),
        (("run", "mode"), "train-only", "rollout.saved"),
        (("rollout", "engine"), "transformer", "rollout.engine"),
        (("rollout", "samples"), 1, "rollout.samples"),
        (("rollout", "prompts"), 63, "rollout.prompts"),
        (("rollout", "temperature"), 0.0, "rollout.temperature"),
        (("rollout", "stop"), ["\u00e9"], "rollout.stop"),
        (("rollout", "postprocess"), "nowhere", "rollout.postprocess"),
        (("algorithm", "loss"), "cliped", "algorithm.loss"),
        (("algorithm", "kl_target"), 0.5, "algorithm.kl_target"),
        (("algorithm", "correction"), "token", "algorithm.correction"),
        (("reward", "name"), "position-mach", "reward.name"),
        (("reward", "options"), {"of": 1}, "reward.options"),
        (("data", "source"), "sort-digit", "data.source"),
        (("data", "held_out"), 10**6, "data.held_out"),
        (("model", "tokenizer"), "characters:", "model.tokenizer"),
        (("model", "config", "model_type"), "qwen33", "model.config"),
        (("model", "config", "hidden_sise"), 64, "model.config.hidden_sise"),
        (("model", "config", "vocab_size"), 9, "model.config.vocab_size"),
        (("weights", "transport"), "colective", "weights.transport"),
        (("checkpoint", "resume"), "/none/step-00000001", "checkpoint.resume"),
        (("extensions",), [{"name": "consol"}], "extensions"),
        (("cluster", "device"), "cuda", "cluster.device"),
    ],
)
def test_what_cannot_be_meant_has_its_line(
    keys: Keys, value: Any, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = example("quickstart.toml")
    table = data
    for name in keys[:-1]:
        table = table.setdefault(name, {})
    table[keys[-1]] = value
    lines = check(tmp_path, data, capsys)
    assert any(match[1].startswith(path) for line in lines if (match := PATH.match(line))), lines


def test_an_example_without_its_backend_is_told_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = example("quickstart.toml")
    del data["backend"]
    (line,) = check(tmp_path, data, capsys)
    assert "backend" in line and "required but missing" in line
