from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from corerl import messages
from corerl.messages import (
    did_you_mean,
    did_you_mean_path,
    first_line,
    last_line,
    nearest,
    one_line,
    place,
    shorten_to_end,
)
from corerl.plugin.registry import EXTRAS


def test_a_similar_known_name_is_suggested() -> None:
    known = {"clipped": 1, "value": 2}
    assert (nearest("cliped", known), did_you_mean("cliped", known)) == ("clipped", "; did you mean 'clipped'?")
    assert (nearest("grpo", known), did_you_mean("grpo", known)) == ("", "")
    assert nearest("a", iter(["ab", "a"])) == "a"
    assert [nearest(name, ["fsdp", "GRPO"]) for name in ("FSDP", "Fdsp", "grpo", "gpro")] == ["fsdp"] * 2 + ["GRPO"] * 2


def test_a_similar_existing_path_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "runs/first/checkpoints").mkdir(parents=True)
    for asked, meant in [
        ("runs/frist", "runs/first"),
        ("rnus/first/checkpoints", "runs/first/checkpoints"),
        ("runs/frist/checkpoints/step-00000004", "runs/first"),
    ]:
        assert did_you_mean_path(tmp_path / asked) == f"; did you mean '{tmp_path / meant}'?"
    for asked in ("runs/another", "runs/first", "a/b\0c", "x" * 5000):
        assert did_you_mean_path(str(tmp_path / asked)) == ""


def test_an_error_is_one_line_with_or_without_its_type() -> None:
    error = ValueError("\n  a cause\nand its story")
    assert (first_line(error), one_line(error)) == ("a cause", "ValueError: a cause")
    assert last_line(error) == "and its story"
    assert (first_line(KeyError()), last_line(KeyError()), one_line(KeyError())) == ("KeyError", "KeyError", "KeyError")


def test_what_is_missing_is_installed_from_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in {extra for extras in EXTRAS.values() for extra in extras.values()}:
        *command, place = shlex.split(messages.install_hint(extra))
        directory = Path(place.partition("[")[0])
        assert command == ["pip", "install", "-e"] and (directory / "pyproject.toml").exists()
        assert directory.name == extra or extra in ("wandb", "mlflow")
    monkeypatch.setattr(messages, "CHECKOUT", tmp_path)  # as of a wheel
    assert messages.install_hint("sglang") == "pip install 'corerl[sglang]'"
    for plugin in ("algorithms", "sglang", "observe", "fsdp"):
        (tmp_path / "plugins" / plugin).mkdir(parents=True)
        (tmp_path / "plugins" / plugin / "pyproject.toml").touch()
    found = {extra: messages.install_hint(extra) for extra in ("fsdp", "sglang", "wandb", "absent")}
    assert found == {
        "fsdp": f"pip install -e {tmp_path}/plugins/fsdp",
        "sglang": f"pip install -e '{tmp_path}/plugins/sglang[server]'",
        "wandb": f"pip install -e '{tmp_path}/plugins/observe[wandb]'",
        "absent": "pip install 'corerl[absent]'",
    }


def test_place_is_the_innermost_own_line() -> None:
    def reads(text: str) -> None:
        json.loads(text)

    with pytest.raises(ValueError) as caught:
        reads("[")
    line = reads.__code__.co_firstlineno + 1
    assert place(caught.value, lambda frame: frame.f_globals is globals()) == f" (tests/test_messages.py:{line})"
    assert re.fullmatch(r" \(/.*/json/decoder\.py:\d+\)", place(caught.value, lambda frame: True))
    assert place(caught.value, lambda frame: False) == ""
    assert place(ValueError("was never raised"), lambda frame: True) == ""


def test_shorten_to_end_keeps_the_last_characters() -> None:
    assert shorten_to_end("x" * 10**6 + "2 + 3 = ", 12) == "...x2 + 3 = "
    assert [shorten_to_end("2 + 3 = ", longest) for longest in (8, 7, 3)] == ["2 + 3 = ", "...3 = ", "..."]
    assert shorten_to_end("a\nb", 4) == "a\\nb"
