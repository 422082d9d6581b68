"""What `corerl` has for plugins, users and their tests, read from its files; and which imports take anything else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import corerl
import corerl_testing

CORE = Path(corerl.__file__).parent
WHOLE = {  # modules and packages all of whose names are public
    "corerl.types",
    "corerl.errors",
    "corerl.kinds",
    "corerl.messages",
    "corerl.pictures",
    "corerl_testing.plugin",
    "corerl_testing.scenarios",
    "corerl_testing.suite",
    "corerl_testing.algorithm_suite",
}


def names_of(init: Path) -> dict[str, str]:
    """By name, the module that each public one is from: what the file imports for type checkers."""
    return {
        alias.asname or alias.name: str(node.module)
        for block in ast.parse(init.read_text()).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


PUBLIC = {f"corerl.{init.parent.name}": names for init in CORE.glob("*/__init__.py") if (names := names_of(init))}
PUBLIC["corerl"] = names_of(CORE / "__init__.py")
PUBLIC["corerl_testing"] = names_of(Path(corerl_testing.__file__).parent / "__init__.py")


def imports_of(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) for each name that a file imports from corerl; the name is "" where a module is imported."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names if is_core(node.module))
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if is_core(alias.name))


def is_core(module: str) -> bool:
    return module.partition(".")[0] in ("corerl", "corerl_testing")


def is_public(module: str, name: str) -> bool:
    return module in WHOLE or name in PUBLIC.get(module, ()) or (module in PUBLIC and name in ("", "__version__"))
