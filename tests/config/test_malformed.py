"""Every setting with a value of another type, and with another name: a line with its path, never another error."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from corerl.config.load import config_of
from corerl.config.schema import Config
from corerl.errors import ConfigError
from docs._ext.settings import describe

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PLAIN = {"backend": {"name": "plain"}}
SETTINGS = [entry.path for entry in describe(Config) if "[]" not in entry.path]


def refused(override: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_of(PLAIN, [override])
    return caught.value.message.splitlines()


def test_a_value_of_another_type_has_its_line() -> None:
    found = {path: refused(f"{path}=[[1]]") for path in SETTINGS}
    assert len(found) > 100
    assert [lines for path, lines in found.items() if not all(line.startswith(path) for line in lines)] == []


@pytest.mark.parametrize("example", sorted({path.name for path in EXAMPLES.glob("*.toml")} - {"serve.toml"}))
def test_every_example_is_read(example: str) -> None:
    assert config_of(tomllib.loads((EXAMPLES / example).read_text())).backend.name
