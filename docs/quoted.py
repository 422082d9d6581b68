"""Write code and computed tables into the pages that show them, so that they read in the repository as when built.

    python docs/quoted.py

A block under a line `<!-- code: FILE NAME from 'TEXT' to 'TEXT' -->` is a part of FILE, a path in the repository: the
class, function or method NAME, from the first line with a TEXT up to another, each of these if it is given. A table
under a line `<!-- table: MODULE FUNCTION -->` is what the function returns. What stands between a line
`<!-- reference: NAME -->` and the end of that reference is made by docs/_ext/reference.py. A test checks that pages are
up to date.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shlex
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^<!-- code: (?P<asked>[^\n]*) -->\n```\w+\n.*?^```$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^(?P<mark><!-- table: (?P<module>[\w.]+) (?P<function>\w+) -->\n)(?:\|[^\n]*\n)+", re.MULTILINE)
END = "<!-- end of the reference -->"
REFERENCE = re.compile(
    rf"^(?P<mark><!-- reference: (?P<name>\w+) -->\n)(?:(?:(?!^<!-- reference: ).)*?^{END}\n)?",
    re.MULTILINE | re.DOTALL,
)
# Not "python": tests run each of those blocks by itself.
LANGUAGES = {".py": "python3", ".toml": "toml", ".yml": "yaml"}


def pages() -> list[Path]:
    return sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)


def written(page: str) -> str:
    """The page with the code that its files have now, and its tables computed. Raises ValueError where a file has not
    what is asked for."""
    return REFERENCE.sub(_reference, TABLE.sub(_table, BLOCK.sub(_block, page)))


def _reference(found: re.Match[str]) -> str:
    made: str = references()[found["name"]]()
    return f"{found['mark']}\n{made.strip()}\n\n{END}\n"


@functools.cache
def references() -> dict[str, Callable[[], str]]:
    """By name, what makes each reference."""
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))  # the module imports others that are there
    made: dict[str, Callable[[], str]] = importlib.import_module("reference").REFERENCES
    return made


def _table(found: re.Match[str]) -> str:
    rows: str = getattr(importlib.import_module(found["module"]), found["function"])()
    return found["mark"] + rows


def _block(found: re.Match[str]) -> str:
    file, *asked = shlex.split(found["asked"])
    code = (ROOT / file).read_text()
    if len(asked) % 2:
        code = _object(code, asked.pop(0))
    lines = code.splitlines()
    for word, text in zip(asked[::2], asked[1::2], strict=True):
        at = next((number for number, line in enumerate(lines) if text in line), None)
        if word not in ("from", "to") or at is None:
            raise ValueError(f"{found['asked']}: no line with {text!r}, or {word!r} is neither 'from' nor 'to'")
        lines = lines[at:] if word == "from" else lines[:at]
    shown = textwrap.dedent("\n".join(lines)).strip("\n")
    return f"<!-- code: {found['asked']} -->\n```{LANGUAGES[Path(file).suffix]}\n{shown}\n```"


def _object(code: str, name: str) -> str:
    node: ast.AST = ast.parse(code)
    for part in name.split("."):
        node = next((each for each in ast.iter_child_nodes(node) if getattr(each, "name", "") == part), ast.Pass())
    if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        raise ValueError(f"there is no class, function or method {name}")
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return "\n".join(code.splitlines()[first - 1 : node.end_lineno])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # for the modules of tables
    for each in pages():
        each.write_text(written(each.read_text()))
