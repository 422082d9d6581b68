"""All errors of core are in one file, and in the tree that it shows."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from corerl import errors

CORE = Path(errors.__file__).parent
ALL = {name for name, each in vars(errors).items() if inspect.isclass(each) and issubclass(each, errors.CorerlError)}


def test_every_error_of_core_is_in_the_file_of_errors() -> None:
    elsewhere = {
        f"{path.relative_to(CORE)}: {node.name}"
        for path in CORE.rglob("*.py")
        if path != Path(errors.__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any(isinstance(base, ast.Name) and base.id in ALL for base in node.bases)
    }
    assert elsewhere == set()


def test_the_documented_tree_shows_every_error() -> None:
    above: list[tuple[int, str]] = []  # (indent, name), the outermost first
    shown: dict[str, str] = {}
    for line in str(errors.__doc__).splitlines():
        names = [word for word in re.findall(r"\w+", line) if word in ALL]
        indent = len(line) - len(line.lstrip())
        above = [each for each in above if each[0] < indent]
        shown |= dict.fromkeys(names, above[-1][1] if above else "Exception")
        above += [(indent, name) for name in names]
    assert shown == {name: vars(errors)[name].__base__.__name__ for name in ALL}
