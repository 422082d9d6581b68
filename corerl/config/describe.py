"""Describe the settings of a config class in words: each field with its type, default and help text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import attrs
from attrs import frozen

from corerl.config.schema import Config
from corerl.config.words import class_fields, is_union, spell, to_plain, toml_value


@frozen(kw_only=True)
class FieldHelp:
    """One setting. `path` is dotted and relative to the class; an array of tables adds `[]`."""

    path: str
    type: str  # in words: integer, number, string, one of 'a', 'b'
    default: str  # as TOML; or "required", "unset" (None), "computed" (from other settings)
    help: str


def describe(cls: type) -> list[FieldHelp]:
    """Every setting of a frozen attrs class, tables expanded, in the order of the class."""
    return list(_describe(cls, ""))


def _describe(cls: type, prefix: str) -> Iterator[FieldHelp]:
    for attribute in class_fields(cls).values():
        kind: Any = attribute.type
        path = prefix + attribute.name
        if attrs.has(kind):
            yield from _describe(kind, f"{path}.")
            continue
        yield FieldHelp(
            path=path, type=spell(kind), default=_default(attribute), help=attribute.metadata.get("help", "")
        )
        for arm in get_args(kind) if is_union(kind) else (kind,):
            for argument in (arm, *get_args(arm)):
                if attrs.has(argument):
                    yield from _describe(argument, f"{path}[]." if get_origin(arm) is tuple else f"{path}.")


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


def _helps(table: str, options: Any) -> dict[str, str]:
    """The help texts of a plugin's options; none if these are not known."""
    known = describe(type(options)) if attrs.has(type(options)) else []
    return {f"{table}.{entry.path.replace('[]', '')}": entry.help for entry in known}


def annotate(toml: str, config: Config) -> str:
    """The text of `dump_toml(config)` with each setting's help as a comment above it."""
    helps = {entry.path.replace("[]", ""): entry.help for entry in describe(Config)}
    for kind in ("backends", "engines", "samplers", "algorithms", "transports"):
        for name, options in getattr(config, kind).items():
            helps |= _helps(f"{kind}.{name}", options)
    extensions, own = (
        [_helps("extensions.options", each.options) for each in config.chosen_extensions],
        dict[str, str](),
    )
    lines, table = [], ""
    for line in toml.removesuffix("\n").split("\n"):  # not splitlines: a string may hold other line separators
        if header := re.fullmatch(r"\[\[?(.+?)\]?\]", line):
            table = header[1] + "."
            if line == "[[extensions]]":
                own = extensions.pop(0)
        # an array's items are indented, so a key at the start of a line is a setting of the current table
        elif (setting := re.match(r"([\w-]+) = ", line)) and (text := (helps | own).get(table + setting[1])):
            lines.append(f"# {text}")
        lines.append(line)
    return "\n".join(lines) + "\n"
