"""Settings as text: types and values as TOML writes them, and plain data."""

from __future__ import annotations

import json
import re
import tomllib
import types
from collections.abc import Mapping
from datetime import date, time
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from corerl.messages import short_repr


def class_fields(cls: type) -> Mapping[str, attrs.Attribute[Any]]:
    """The settings of an attrs class by name, their annotations resolved to types."""
    attrs.resolve_types(cls)
    return {attribute.name: attribute for attribute in attrs.fields(cls) if attribute.init}


def is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def choices(kind: Any) -> tuple[Any, ...]:
    """The values that a Literal, an Enum, or a union of them allows; () for any other type."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(member.value for member in kind)
    if is_union(kind):
        parts = [choices(arm) for arm in get_args(kind) if arm is not type(None)]
        return tuple(value for part in parts for value in part) if all(parts) else ()
    return ()


def spell(kind: Any) -> str:
    """A type's name for a user of TOML."""
    if allowed := choices(kind):
        return ("one of " if len(allowed) > 1 else "") + ", ".join(repr(value) for value in allowed)
    if is_union(kind):
        return " or ".join(spell(arm) for arm in get_args(kind) if arm is not type(None))
    names = {bool: "true or false", int: "integer", float: "number", str: "string", Any: "any value"}
    if kind in names:
        return names[kind]
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if attrs.has(origin) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return "table"
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return f"array of {len(arguments)}"
    if arguments:
        return f"array of {', '.join(map(repr, choices(arguments[0]))) or spell(arguments[0]) + 's'}"
    return getattr(kind, "__name__", str(kind))


def spell_value(value: Any) -> str:
    """A value as it is in the file, with its TOML type."""
    match value:
        case bool():
            return "true" if value else "false"
        case str() | int() | float():
            return f"{spell(type(value))} {short_repr(value)}"
        case Mapping():
            return "a table"
        case list() | tuple():
            return "an array"
        case date() | time():
            return f"{type(value).__name__} {value}"
        case _:
            return f"{type(value).__name__} {short_repr(value)}"


def to_plain(value: Any) -> Any:
    """Convert attrs instances to dicts, recursively; None is left out, since TOML has no null."""
    if attrs.has(type(value)):
        return to_plain({name: getattr(value, name) for name in class_fields(type(value))})
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def toml_value(plain: Any) -> str:
    """Plain data on one line of TOML."""
    if isinstance(plain, dict):
        return "{" + ", ".join(f"{toml_key(key)} = {toml_value(item)}" for key, item in plain.items()) + "}"
    if isinstance(plain, list):
        return "[" + ", ".join(toml_value(item) for item in plain) + "]"
    # JSON spells strings, booleans and finite numbers as TOML does
    return escaped(json.dumps(plain, ensure_ascii=False)) if isinstance(plain, (str, bool, int)) else str(plain)


# What TOML allows in strings and a terminal obeys: C1 controls and marks that turn the direction of text around.
CONTROLS = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escaped(toml: str) -> str:
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", toml)


def toml_key(name: str) -> str:
    """One part of a dotted key, quoted if TOML requires it."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else escaped(json.dumps(name, ensure_ascii=False))


def parse_toml(text: str) -> Any:
    """Parse one TOML value, as after an equals sign; anything that is not valid TOML is a string."""
    try:
        data = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # TOMLDecodeError; too many digits; nested too deeply
        return text
    # no setting is a date, so run.dir=2024-05-01 means the string
    return text if len(data) > 1 or isinstance(data["value"], (date, time)) else data["value"]
