"""Every setting of a config class, for the reference tables and for tests that go through all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import attrs
from attrs import frozen

from corerl.config.toml_text import class_fields, is_union, spell, to_plain, toml_value


@frozen(kw_only=True)
class FieldHelp:
    """One setting. `path` is dotted and relative to the class; an array of tables adds `[]`."""

    path: str
    type: str  # in words: integer, number, string, one of 'a', 'b'
    default: str  # as TOML; or "required", "unset" (None), "computed" (from other settings)
    help: str


def describe(cls: type, prefix: str = "") -> Iterator[FieldHelp]:
    """Every setting of a frozen attrs class, tables expanded, in the order of the class."""
    for attribute in class_fields(cls).values():
        kind: Any = attribute.type
        path = prefix + attribute.name
        if attrs.has(kind):
            yield from describe(kind, f"{path}.")
            continue
        yield FieldHelp(
            path=path, type=spell(kind), default=_default(attribute), help=attribute.metadata.get("help", "")
        )
        for arm in get_args(kind) if is_union(kind) else (kind,):
            for argument in (arm, *get_args(arm)):
                if attrs.has(argument):
                    yield from describe(argument, f"{path}[]." if get_origin(arm) is tuple else f"{path}.")


def _default(attribute: attrs.Attribute[Any]) -> str:
    default: Any = attribute.default
    if default is attrs.NOTHING:
        return "required"
    factory = getattr(default, "factory", None)
    if factory is not None:
        if default.takes_self:
            return "computed"
        default = factory()
    return "unset" if default is None else toml_value(to_plain(default))
