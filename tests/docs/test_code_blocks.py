"""What README and the documentation tell people to type works: Python runs, TOML loads, commands exist."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from corerl.cli.main import main
from corerl.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "plugins").glob("*/README.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    page: str
    line: int  # of its fence
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, markdown: str) -> list[Block]:
    return [
        Block(page, markdown.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in FENCE.finditer(markdown)
    ]


BLOCKS = [
    block
    for page in PAGES
    if "_build" not in page.parts
    for block in blocks_of(str(page.relative_to(ROOT)), page.read_text())
]


def each(language: str) -> Callable[..., object]:
    chosen = [block for block in BLOCKS if block.language == language]
    return pytest.mark.parametrize("block", chosen, ids=str)


def test_a_block_is_found_with_its_line_and_language() -> None:
    page = "# T\n\n```toml\na = 1\n```\n\ntext\n\n```python\nx = 1\n```\n"
    assert blocks_of("p.md", page) == [Block("p.md", 3, "toml", "a = 1\n"), Block("p.md", 9, "python", "x = 1\n")]


@pytest.mark.processes
@each("python")
def test_python_runs_as_it_stands(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), {"__name__": "__documentation__"})


@each("toml")
def test_toml_is_valid_and_loads_as_a_run_where_it_names_a_backend(block: Block, tmp_path: Path) -> None:
    tables = tomllib.loads(block.text)
    if "backend" not in tables:
        return
    file = tmp_path / "run.toml"
    file.write_text(block.text)
    assert load_config(file).backend.name == tables["backend"]["name"]


@each("console")
def test_commands_exist(block: Block) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in re.findall(r"^\$ (.*)$", block.text, re.MULTILINE):
        words = command.split()
        if words[0] == "make":
            assert words[1] in targets
        elif words[0] == "corerl" and not words[1].startswith("-"):
            with pytest.raises(SystemExit) as end:
                main([words[1], "--help"])
            assert end.value.code == 0, command
