"""Settings as TOML, each below a comment with its help and its type."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from corerl.config import class_fields, spell, to_plain, toml_key, toml_value

WIDTH = 100  # columns of a comment


def settings_with_help(table: Any, path: str = "") -> Iterator[str]:
    """The lines of a table, an attrs instance or a mapping, and of the tables in it: each setting below a comment with
    its help and its type. One that is unset is a comment too."""
    tables: list[tuple[str, str, Any]] = []
    for name, value, about in _settings(table):
        if _is_table(value) or (isinstance(value, tuple) and value and attrs.has(type(value[0]))):
            tables.append((name, about, value))  # TOML wants a table's own settings before its subtables
            continue
        yield from comment(about)
        yield f"# {toml_key(name)} =" if value is None else f"{toml_key(name)} = {toml_value(to_plain(value))}"
    for name, about, value in tables:
        inside = f"{path}.{toml_key(name)}" if path else toml_key(name)
        for each in value if isinstance(value, tuple) else (value,):
            yield ""
            yield from comment(about)
            yield f"[[{inside}]]" if isinstance(value, tuple) else f"[{inside}]"
            yield from settings_with_help(each, inside)


def _settings(table: Any) -> Iterator[tuple[str, Any, str]]:
    """Name, value and help of each setting of a table."""
    if isinstance(table, Mapping):
        yield from ((name, value, "") for name, value in table.items())
        return
    for attribute in class_fields(type(table)).values():
        value = getattr(table, attribute.name)
        about = attribute.metadata.get("help", "")
        if not _is_table(value):
            unset = "; unset" if attribute.default is None else ""
            if getattr(attribute.default, "takes_self", False):
                unset = "; computed from the others by default"
            about = f"{about} ({spell(attribute.type)}{unset})".strip()
        yield attribute.name, value, about


def _is_table(value: Any) -> bool:
    """Whether a value gets a header of its own: a mapping of plain values stands on one line."""
    if isinstance(value, Mapping):
        return any(isinstance(each, Mapping) or attrs.has(type(each)) for each in value.values())
    return attrs.has(type(value))


def comment(text: str) -> list[str]:
    """The lines of a comment."""
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False, break_long_words=False
    )
