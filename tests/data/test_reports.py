"""What is told of the reading of files, with a clock that goes on by 6 s each time it is looked at."""

from __future__ import annotations

import itertools
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corerl.config.schema import DataConfig
from corerl.data.load import load_prompts
from corerl.data.reports import Reports
from tests.data.files import numbered


def told_of(source: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr("corerl.data.rows.BATCH", 2)
    reports = Reports(said.append, itertools.count(0.0, 6.0).__next__)
    load_prompts(DataConfig(source=str(source), held_out=1), seed=0, reports=reports)
    return said


def test_reading_lines_tells_how_many_there_are_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = numbered(tmp_path / "p.jsonl", 9)
    # After 6 s nothing, after 12 s one, 6 s are taken by the saying of it.
    assert told_of(path, monkeypatch) == [f"reading {path}: 4 rows", f"reading {path}: 8 rows"]


def test_unpacking_and_checking_tell_how_many_of_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [str(number) for number in range(1000, 1009)]
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": texts}), path)
    assert told_of(path, monkeypatch) == [
        *(f"unpacking {path}: {done} of 9 rows" for done in (4, 8)),
        *(f"reading {path}: {done} of 9 rows" for done in (2, 6)),
    ]
    saved = tmp_path / "saved"
    monkeypatch.setattr(datasets.config, "DEFAULT_MAX_BATCH_SIZE", 3)
    datasets.Dataset.from_dict({"prompt": texts}).save_to_disk(saved)
    assert told_of(saved, monkeypatch)[0] == f"checking {saved}: 6 of 9 rows"
