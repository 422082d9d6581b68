"""All errors of core are in one file."""

from __future__ import annotations

import ast
import inspect
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
