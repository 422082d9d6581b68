"""Every input that a fuzz run has found to be answered badly is answered well now."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fuzz
from corerl.cli import config as command
from corerl.errors import DataError
from corerl.types import SampleBatch
from fuzz.case import SECRET, Case, case_of
from fuzz.doors import surroundings, try_case
from fuzz.edits import apply
from fuzz.inputs import write_inputs

CORPUS = sorted(Path(fuzz.__file__).with_name("corpus").glob("*.json"))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here, directory = os.getcwd(), tmp_path_factory.mktemp("inputs")
    try:
        write_inputs(directory)
    finally:
        os.chdir(here)
    return directory


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    with surroundings():
        yield


@pytest.mark.processes  # chat templates are rendered in another one
@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_what_was_found_once_is_answered_well(file: Path, inputs: Path) -> None:
    finding = try_case(case_of(json.loads(file.read_text())["case"]), inputs)
    assert finding is None, finding


@pytest.mark.parametrize(
    "command",
    [
        ("config", "check", "chats.toml"),
        ("config", "show", "full.toml"),
        ("export", "run", "out"),
        ("eval", "fields", "--json", "reward.processes=0"),
    ],
)
def test_the_inputs_are_valid_before_they_are_edited(command: tuple[str, ...], inputs: Path) -> None:
    assert try_case(Case(kind="config", command=command, runs=True), inputs) is None


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (
            lambda: SampleBatch(tokens=np.arange(5), offsets=np.array([1, 3])),
            "ValueError in corerl/types.py:__attrs_post_init__",
        ),
        (DataError("\x1b" * 9), None),  # escaped
        (DataError("a\nb"), None),  # one line
        (f"corerl: error: {SECRET}", "secret in config check"),
        ("corerl: error: \x1b[31m", "control characters in config check"),
        (f"corerl: error: {'a' * 1000}", "long line in config check"),
        ("Traceback (most recent call last)", "shown traceback in config check"),
        ("", "status 1 without a word in config check"),
        (0, "check without ok"),
    ],
)
def test_bad_answers_are_findings(
    answer: Any, found: str | None, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(args: Any) -> int:
        if callable(answer):
            answer()
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, str):
            print(answer, file=sys.stderr)
            return 1
        return int(answer)

    monkeypatch.setattr(command, "run_check", run)
    finding = try_case(Case(kind="config", command=("config", "check", "texts.toml")), inputs)
    assert (finding and finding.key) == found


def test_an_edit_behind_a_link_leaves_the_inputs_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, scratch = tmp_path / "inputs", tmp_path / "scratch"
    (own / "model").mkdir(parents=True)
    (own / "saved" / "actor").mkdir(parents=True)
    scratch.mkdir()
    for name in ("model", "saved"):
        (scratch / name).symlink_to(own / name)
    monkeypatch.chdir(scratch)
    apply([("become", "saved/actor", "model"), ("become", "saved/actor/a.safetensors", "loop")], own)
    assert Path("saved/actor").samefile(own / "model") and list((own / "model").iterdir()) == []
