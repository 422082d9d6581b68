"""The messages that docs/errors.md quotes are those of the code, but for the values in them."""

from __future__ import annotations

import ast
import errno
import os
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A number, a path, a name, a setting: what differs.
VALUE = re.compile(r"\S*[\d'/_<\[]\S*|\.\.\.\S*|\b[a-z]+\.[a-z]\S*|\b[A-Z]{3,}\b")
FEW = 2  # words that may be values too, such as a role's and a hook's name


@cache
def literals() -> str:
    """All that the code can say, each part between values in a line: its strings, but for docstrings; the system's."""
    found = [os.strerror(number) for number in errno.errorcode]
    for path in [*ROOT.glob("corerl/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        apart = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in apart:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\n" for part in node.values]
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def unsaid(words: list[str]) -> list[str]:
    """More than a few words in a row that no message has; [] if the code says them all."""
    if len(words) <= FEW:
        return []
    for length in range(len(words), FEW, -1):
        for start in range(len(words) - length + 1):
            if " ".join(words[start : start + length]) in literals():
                return unsaid(words[:start]) + unsaid(words[start + length :])
    return words


def quoted() -> list[str]:
    """What the table's second column has in backticks."""
    rows = [
        line.strip("|").split(" | ") for line in (ROOT / "docs/errors.md").read_text().splitlines() if line[:1] == "|"
    ]
    return [text for row in rows[2:] for text in re.findall(r"`([^`]+)`", row[1])]


def test_every_message_on_the_page_is_one_of_the_codes() -> None:
    assert len(quoted()) > 40
    runs = {text: [unsaid(run.split()) for run in VALUE.split(text)] for text in quoted()}
    assert {text: found for text, found in runs.items() if any(found)} == {}


@pytest.mark.parametrize(
    "text", ["no Ray cluster can be reached there", "the checkpoint is not what it was on the disk"]
)
def test_a_message_that_the_code_never_had_is_found(text: str) -> None:
    assert unsaid(text.split())
