"""Files of JSON lines, patterns of them, and what is said of all others."""

import json
import re
from pathlib import Path

import pytest

from corerl.config.load import config_of
from corerl.data import files
from corerl.data.prompts import PromptSource
from corerl.errors import ConfigError, DataError
from corerl.messages import install_hint
from corerl.plan.settle import with_absolute_paths
from tests.data.files import load, parquet, write


def put(directory: Path, *names: str) -> Path:
    """Files of three rows each."""
    directory.mkdir(parents=True)
    for name in names:
        rows = ({"prompt": f"{name} {number}", "answer": str(number)} for number in range(3))
        write(directory / f"{name}.jsonl", *map(json.dumps, rows))
    return directory


def texts(source: PromptSource) -> list[str]:
    return [source.prompt(index).text for index in range(len(source))]


def test_rows_of_a_jsonl_file_are_read_where_they_stand(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "grüß", "answer": "a", "level": 2}',
        "",
        '{"prompt": "two"}',
        '{"answer": 42, "prompt": "three"}',
    ]
    path = write(tmp_path / "p.jsonl", *lines)
    source = load(path)
    first, second, third = (source.prompt(index) for index in range(3))
    assert (first.index, first.text, first.answer, first.fields["level"]) == (0, "grüß", "a", 2)
    assert (second.text, second.answer) == ("two", "")
    assert (third.text, third.answer) == ("three", "42")
    assert sorted([*source.train.tolist(), *source.held_out.tolist()]) == [0, 1, 2]
    assert [source.where(index) for index in range(3)] == [f"{path}:{line}" for line in (1, 3, 4)]
    assert load(path, chat=True).where(1) == f"{path}:3"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.txt", "x", "has files of the formats .txt, expected a .jsonl, .parquet, .*; convert them to one format"),
        ("d.parquet", "no parquet at all", "cannot read .*d.parquet: .*[Pp]arquet magic bytes not found.*; expected"),
        ("d.jsonl", "", "d.jsonl is empty"),
        ("none.jsonl", None, r"cannot read .*none.jsonl: No such file or directory; expected .*`$"),
        ("none.parquet", None, "cannot read .*none.parquet: .*[Nn]o such file"),
        ("", None, "cannot read .*: .*doesn't contain any data files"),  # a directory
    ],
)
def test_a_source_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / name if content is None else write(tmp_path / name, content)
    with pytest.raises(DataError, match=f"^data.source: .*{message}"):
        load(path)
    with pytest.raises(ConfigError, match="unknown source 'sort-digit'; known: sort-digits, .*did you mean"):
        load("sort-digit")


def test_without_a_wheel_that_reads_them_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "p.parquet", prompt=["x", "y"])
    directory = put(tmp_path / "set", "train")
    monkeypatch.setattr(files, "formats_here", list)
    hint = re.escape(install_hint("data"))
    for source in (path, directory):
        with pytest.raises(ConfigError, match=f"only .jsonl files are read; {hint} to read "):
            load(source)
    assert len(load(directory / "train.jsonl")) == 3


def test_a_pattern_is_read_in_the_order_of_the_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "set" / "deep", "train-b", "train-a", "test")
    source = load(tmp_path / "set" / "**" / "train-*.jsonl")
    assert texts(source) == [f"train-{name} {i}" for name in "ab" for i in range(3)]
    assert source.where(4) == f"{tmp_path / 'set' / 'deep' / 'train-b.jsonl'}:2"
    with pytest.raises(DataError, match=r"no file matches '.*/none-\*.jsonl'; correct the pattern"):
        load(tmp_path / "none-*.jsonl")
    monkeypatch.chdir(tmp_path / "set" / "deep")
    config = with_absolute_paths(config_of({"backend": {"name": "plain"}, "data": {"source": "train-*.jsonl"}}))
    monkeypatch.chdir("/")
    assert texts(load(config.data.source)) == texts(source)
    parquet(tmp_path / "set" / "deep" / "train-c.parquet", prompt=["x"])
    with pytest.raises(DataError, match=r"has files of the formats .jsonl, .parquet, expected .*; convert them to one"):
        load(tmp_path / "set" / "deep" / "t*")
