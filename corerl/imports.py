"""Lazy imports of public names, faster imports of large packages such as torch, and when `sys.path` has changed."""

from __future__ import annotations

import ast
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module

# Places of sys.path, each with the time in ns of its last change; 0 for one that does not exist
Where = tuple[tuple[str, int], ...]


def on_demand(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose `__init__` is `file`: the names that it imports under
    `if TYPE_CHECKING:`, each of which is imported when it is first asked for, and `__all__`, which lists them.

    Imports at once would make a circle, since a submodule imports its package first, and would load torch for a name
    that needs none.
    """

    @cache
    def modules() -> dict[str, str]:
        with open(file, encoding="utf-8") as source:
            (block,) = (node for node in ast.parse(source.read()).body if isinstance(node, ast.If))
        imports = (node for node in block.body if isinstance(node, ast.ImportFrom) and node.module)
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def names() -> list[str]:
        return sorted(modules())

    def load(name: str) -> object:
        if name == "__all__":
            return names()
        if name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        where = modules()[name]
        try:
            module = import_module(where)
        except AttributeError as error:  # which Python would take for the lack of `name`, and drop
            raise ImportError(f"{where} cannot be imported: {error}") from error
        value = vars(module)[name]
        setattr(sys.modules[package], name, value)  # from now on Python finds it without asking
        return value

    return load, names


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside the block, and exclude what exists at its end from later collections.

    Modules stay loaded, yet walking their objects takes a fifth of the time to import torch and transformers, and later
    a third of a second per collection, on one rank while the others wait.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def importable() -> Where:
    """As long as this stays the same, nothing is installed, upgraded or removed."""
    return tuple((path, _changed(path or os.curdir)) for path in sys.path)


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
