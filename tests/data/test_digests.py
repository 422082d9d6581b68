"""Digests are compared with what equal rows are, places with a search row by row."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corerl.data.digests import packed
from corerl.data.prompts import PromptSource
from corerl.errors import CheckpointError, DataError
from corerl_data.changed import unpacked
from tests.data.files import load, numbered, write

ROW = {"prompt": "2+2?", "answer": "4", "level": 3}


def digests_of(source: PromptSource) -> list[int]:
    (component,) = source.components
    return component.digests.tolist()


def test_equal_rows_have_equal_digests_in_any_kind_of_file(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4", "info": {"a": 1, "b": None}, "level": None},
        {"prompt": [{"role": "user", "content": "é", "name": "u"}], "info": {"b": "x", "places": [1, 2]}, "level": 2},
    ]
    rows = [{**row, "vector": [0.5] * n} for n, row in enumerate(rows)]
    lines = load(write(tmp_path / "a.jsonl", *map(json.dumps, rows)))
    turned = (json.dumps(dict(reversed(row.items())), ensure_ascii=False, separators=("  ,", " :")) for row in rows)
    other = load(write(tmp_path / "b.jsonl", *turned))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert digests_of(lines) == digests_of(other) == digests_of(load(tmp_path / "a.parquet"))


# ---- what is held out ------------------------------------------------------------------------------------------------


def held_out(source: PromptSource) -> list[str]:
    return [prompt.text for prompt in source.held_out_prompts()]


def test_copies_of_held_out_rows_are_not_trained_on(tmp_path: Path) -> None:
    lines = numbered(tmp_path / "p.jsonl", 10).read_text().splitlines()
    alone = load(tmp_path / "p.jsonl", held_out=3)
    twice = load(write(tmp_path / "t.jsonl", *lines, *lines), held_out=3)
    assert held_out(twice) == held_out(alone)
    trained = [twice.prompt(index).text for index in twice.train.tolist()]
    assert sorted(trained) == sorted([f"p{n}" for n in range(10) if f"p{n}" not in held_out(alone)] * 2)
    assert (alone.copies, twice.copies, len(twice)) == (0, 3, 17)


def test_rows_that_are_all_copies_are_trained_on(tmp_path: Path) -> None:
    source = load(write(tmp_path / "p.jsonl", *[json.dumps(ROW)] * 6), held_out=2)
    assert (len(source.train), len(source.held_out), source.copies) == (4, 2, 0)
    with pytest.raises(DataError, match="held_out=6 leaves nothing to train on: .* has 6 prompts"):
        load(tmp_path / "p.jsonl", held_out=6)


# ---- arrays of digests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["no base64", "AAAA", packed(np.arange(3, dtype=np.uint64))[:-4]])
def test_damaged_digests_are_named(text: str) -> None:
    with pytest.raises(CheckpointError, match="digests of rows cannot be read .*; resume from another checkpoint"):
        unpacked(text)
