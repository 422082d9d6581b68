"""Let `help()` of an attrs class show what its code says of each field, in comments or as an option's help."""

from __future__ import annotations

import ast
import inspect
import io
import sys
import tokenize
from typing import Any

import attrs


def explain(module: str) -> None:
    """Called at the end of a module by its `__name__`: for all attrs classes in it."""
    for each in list(vars(sys.modules[module]).values()):
        if isinstance(each, type) and attrs.has(each) and each.__module__ == module:
            each.__doc__ = _Explained(each.__doc__)  # type: ignore[assignment]  # it gives a text


class _Explained:
    """A docstring with the fields behind it. Their source is read when someone asks for it, and not on import."""

    def __init__(self, own: str | None) -> None:
        self.own = inspect.cleandoc(own or "")

    def __get__(self, instance: object, owner: type) -> str:
        try:
            said = comments(inspect.getsource(owner))
        except (OSError, TypeError):  # the source is not there
            said = {}
        lines = []
        for each in attrs.fields(owner):
            text = each.metadata.get("help") or said.get(each.name, "")
            lines.append(f"    {each.name}: {_type(each)}{f'  # {text}' if text else ''}")
        return "\n".join([self.own, "", "Fields:", *lines])


def comments(source: str) -> dict[str, str]:
    """Field -> what the comments of a class say of it: those beside it, and those in lines of their own above it."""
    (cls,) = (node for node in ast.parse(inspect.cleandoc(source)).body if isinstance(node, ast.ClassDef))
    own: dict[int, str] = {}  # line -> a comment that has it for itself
    beside: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(inspect.cleandoc(source)).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            (own if alone else beside)[token.start[0]] = token.string.removeprefix("#").strip()
    found = {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while first - 1 in own:
                first -= 1
            above = [own[line] for line in range(first, node.lineno)]
            right = [
                beside[line] for line in range(node.lineno, (node.end_lineno or node.lineno) + 1) if line in beside
            ]
            found[node.target.id] = " ".join(above + right)
    return found


def _type(attribute: Any) -> str:
    kind = attribute.type
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
