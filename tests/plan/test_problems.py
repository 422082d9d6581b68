from __future__ import annotations

import pytest

from corerl.errors import ConfigError, DataError, Unsupported
from corerl.plan.check import Problems


def collect(problems: Problems, error: Exception) -> None:
    with problems.stage():
        raise error


def test_several_errors_become_the_lines_of_one() -> None:
    problems = Problems()
    problems.raise_all()
    for _ in range(2):  # said twice is told once
        collect(problems, Unsupported("first"))
    with pytest.raises(Unsupported, match="^first$"):
        problems.raise_all()
    collect(problems, Unsupported("second\nthird"))
    with pytest.raises(ConfigError) as caught:
        problems.raise_all()
    assert caught.value.message == "first\nsecond\nthird"


def test_what_is_no_fault_of_the_users_is_not_collected() -> None:
    with pytest.raises(ZeroDivisionError):
        collect(Problems(), ZeroDivisionError())


@pytest.mark.parametrize(
    ("line", "placed"),
    [
        ("data.jsonl:3: not valid JSON", "data.source: data.jsonl:3: not valid JSON"),
        ("train.parquet: no column", "data.source: train.parquet: no column"),
        ("data.sources[1].weight: 0", "data.sources[1].weight: 0"),
        ("lora.targets: no 'x'", "lora.targets: no 'x'"),
        ("backends.fsdp.shard_size: 3", "backends.fsdp.shard_size: 3"),
        ("extensions: 'a' and 'b'", "extensions: 'a' and 'b'"),
        ("roles.critic.model.path: no files", "roles.critic.model.path: no files"),
    ],
)
def test_a_line_without_a_settings_path_gets_it(line: str, placed: str) -> None:
    problems = Problems()
    with problems.stage("data.source"):
        raise DataError(line)
    with pytest.raises(DataError) as caught:
        problems.raise_all()
    assert caught.value.message == placed
