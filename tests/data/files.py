"""Small data sets in files."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from corerl.config.schema import DataConfig
from corerl.data.prompts import PromptSource
from corerl.data.rows import load_prompts


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def numbered(path: Path, count: int, *, prefix: str = "p") -> Path:
    rows = ({"prompt": f"{prefix}{i}", "answer": f"a{i}", "level": i} for i in range(count))
    return write(path, *map(json.dumps, rows))


def parquet(path: Path, **columns: list[object]) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def load(path: Path | str, *, held_out: int = 1, **settings: Any) -> PromptSource:
    return load_prompts(DataConfig(source=str(path), held_out=held_out, **settings), seed=0)
