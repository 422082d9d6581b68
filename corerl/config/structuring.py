"""Strict structuring of plain data into frozen attrs classes, reporting every problem and not only the first.

"false" is not a bool, and 1.9 is not an int. An int is accepted as a float, an array as a tuple. Validators of all
fields run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from typing import Any, TypeVar, get_args, get_origin

import attrs
from attrs import frozen

from corerl.config.toml_text import choices, class_fields, is_union, parse_toml, spell, spell_value, toml_key
from corerl.errors import ConfigError
from corerl.messages import LONGEST, LONGEST_LINE, did_you_mean, nearest, short_repr, shorten, shorten_inside

T = TypeVar("T")
BOUND = re.compile(r"(Length of )?'\w+' must be (.+?): (.+)")  # a message of attrs' validators
Keys = tuple[str | int, ...]  # the parts of a dotted path; integers index arrays


@frozen
class Problem:
    keys: Keys
    text: str
    within: str = ""  # the setting inside `keys` that the value seems to be for
    unknown: bool = False  # the key is not in its table, and similar to no key there

    def line(self, prefix: str = "") -> str:
        """The problem with its dotted path, below `prefix`."""
        path = prefix
        for key in self.keys:
            path += f"[{key}]" if isinstance(key, int) else "." * bool(path) + shorten(toml_key(key), LONGEST)
        text = shorten_inside(self.text, LONGEST_LINE) + f"; did you mean {path}.{self.within}?" * bool(self.within)
        return f"{path}: {text}" if path else text


def structure(data: Mapping[str, Any], cls: type[T], *, path: str = "") -> T:
    """Structure plain data into an instance of a frozen attrs class, such as a plugin's options.

    Raises ConfigError with one line for each problem, its path relative to `path`.
    """
    value, problems = try_structure(data, cls)
    if value is None:
        raise ConfigError("\n".join(problem.line(path) for problem in problems))
    return value


def try_structure(data: Mapping[str, Any], cls: type[T]) -> tuple[T | None, list[Problem]]:
    """The instance of a frozen attrs class, or None and every problem."""
    problems: list[Problem] = []
    found: T = _read(data, cls, (), problems)
    return (None if problems else found), problems


# ---- reading: each function returns the value as a type, and adds what does not fit to `problems` --------------------


def _read(value: Any, kind: Any, keys: Keys, problems: list[Problem]) -> Any:
    if kind is Any or kind is None:
        return value
    if attrs.has(kind):
        return _read_class(value, kind, keys, problems)
    if is_union(kind):
        return _read_union(value, kind, keys, problems)
    origin = get_origin(kind) or kind
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _read_table(value, kind, keys, problems)
    if isinstance(origin, type) and issubclass(origin, Sequence) and not issubclass(origin, str):
        return _read_array(value, kind, keys, problems)
    return _read_scalar(value, kind, keys, problems)


def _read_scalar(value: Any, kind: Any, keys: Keys, problems: list[Problem]) -> Any:
    wrong = ""
    if allowed := choices(kind):
        if any(type(choice) is type(value) and choice == value for choice in allowed):
            return kind(value) if isinstance(kind, type) else value
        wrong = _mismatch(value, kind)
    elif kind is float and type(value) is int:
        return float(value)
    elif type(value) is not kind:
        wrong = _mismatch(value, kind)
    elif kind is float and math.isnan(value):
        wrong = "expected number, got nan"
    elif kind is str and "\0" in value:  # no path, variable or token may have one, and not every library checks
        wrong = f"expected string without NUL characters, got {short_repr(value)}"
    if wrong:
        problems.append(Problem(keys, wrong))
    return value


def _read_class(value: Any, cls: type, keys: Keys, problems: list[Problem]) -> Any:
    fields = class_fields(cls)
    if not isinstance(value, Mapping):
        # A table's first setting is its main one, such as the name of what its others are for.
        main = next(iter(fields), "")
        kind: Any = fields[main].type if main else None
        meant = type(value) in (get_args(kind) if is_union(kind) else (kind,))
        problems.append(Problem(keys, _mismatch(value, cls), within=main if meant else ""))
        return None
    done: dict[str, Any] = {}
    before = len(problems)
    for name, field in fields.items():
        if name in value:
            done[field.alias or name] = _read_field(value[name], field, (*keys, name), problems)
        elif field.default is attrs.NOTHING:
            problems += _missing(field, (*keys, name))
    problems += _unknown(value.keys() - fields.keys(), cls, keys)
    if len(problems) == before:
        try:
            return cls(**done)
        except Exception as error:  # of a converter, or of a validator that reads several fields
            problems.append(Problem(keys, _text(error)))
    return None


def _read_field(raw: Any, field: attrs.Attribute[Any], keys: Keys, problems: list[Problem]) -> Any:
    """Read one field and run its validator at once: attrs itself would stop at the first failing field."""
    before = len(problems)
    value = _read(raw, field.type, keys, problems)
    if len(problems) == before and field.validator is not None and field.converter is None:
        try:
            field.validator(None, field, value)
        except AttributeError:  # it reads other fields, so it can only run with the whole instance
            pass
        except Exception as error:  # a validator may raise anything
            problems.append(Problem(keys, _text(error)))
    return value


def _read_table(value: Any, kind: Any, keys: Keys, problems: list[Problem]) -> Any:
    if not isinstance(value, Mapping):
        problems.append(Problem(keys, _mismatch(value, kind)))
        return value
    _, inner = get_args(kind) or (str, Any)
    return {key: _read(each, inner, (*keys, key), problems) for key, each in value.items()}


def _read_array(value: Any, kind: Any, keys: Keys, problems: list[Problem]) -> Any:
    is_tuple = issubclass(get_origin(kind) or kind, tuple)
    kinds = get_args(kind) or (Any, ...)
    fixed = is_tuple and kinds[-1] is not Ellipsis
    if not isinstance(value, (list, tuple)):
        problems.append(Problem(keys, _mismatch(value, kind)))
        return value
    if fixed and len(value) != len(kinds):
        problems.append(Problem(keys, f"expected {spell(kind)}, got {len(value)}"))
        return value
    items = [
        _read(each, kinds[number] if fixed else kinds[0], (*keys, number), problems)
        for number, each in enumerate(value)
    ]
    return tuple(items) if is_tuple else items


def _read_union(value: Any, kind: Any, keys: Keys, problems: list[Problem]) -> Any:
    arms = [arm for arm in get_args(kind) if arm is not type(None)]
    tables = [arm for arm in arms if attrs.has(arm)]
    if value is None and len(arms) < len(get_args(kind)):
        return None
    # if only one arm can be meant, its own errors say more than "expected this or that"
    meant = tables if len(tables) == 1 and isinstance(value, Mapping) else arms
    if len(meant) == 1:
        return _read(value, meant[0], keys, problems)
    for arm in arms:
        misfits: list[Problem] = []
        read = _read(value, arm, keys, misfits)
        if not misfits:
            return read
    problems.append(Problem(keys, _mismatch(value, kind)))
    return None


# ---- problems in words -----------------------------------------------------------------------------------------------


def _missing(field: attrs.Attribute[Any], keys: Keys) -> Iterator[Problem]:
    """The problem for a missing required field; for a table, one for each required field in it."""
    kind: Any = field.type
    inner = class_fields(kind).values() if attrs.has(kind) else ()
    required = [part for part in inner if part.default is attrs.NOTHING]
    for part in required:
        yield from _missing(part, (*keys, part.name))
    if not required:
        help_text = field.metadata.get("help", "")
        yield Problem(keys, f"required but missing; set {spell(kind)}" + (f": {help_text}" * bool(help_text)))


def _unknown(extra: Iterable[str], cls: type, keys: Keys) -> Iterator[Problem]:
    known = list(class_fields(cls))
    for key in sorted(extra):
        near = next(iter(deeper(cls, key)), "") or nearest(key, known)
        advice = f"did you mean {near!r}?" if near else f"known: {', '.join(known) or 'none'}"
        yield Problem((*keys, key), f"unknown key; {advice}", unknown=not near)


def deeper(cls: type, key: str) -> list[str]:
    """Dotted paths of `key` in the subtables of `cls`."""
    found = []
    for name, field in class_fields(cls).items():
        kind: Any = field.type
        if attrs.has(kind):
            found += [f"{name}.{key}"] if key in class_fields(kind) else []
            found += [f"{name}.{path}" for path in deeper(kind, key)]
    return found


def _text(error: BaseException) -> str:
    """An exception's message on one line; only its first argument, since attrs' validators add the field and value."""
    message = " ".join((str(error.args[0] if error.args else error) or type(error).__name__).split())
    if bound := BOUND.fullmatch(message):
        length, wanted, value = bound.groups()
        return f"{'its length ' if length else ''}must be {wanted}, got {value}"
    return message


def _mismatch(value: Any, kind: Any) -> str:
    """What was expected and what was found, with a hint for common mistakes: typos and quotes."""
    hint = ""
    if near := did_you_mean(str(value), [str(choice) for choice in choices(kind)]):
        hint = near
    elif kind is str and isinstance(value, (bool, int, float, date, time)):
        hint = "; put it in quotes"
    elif isinstance(value, str):
        parsed = type(parse_toml(value))
        if parsed is kind or (kind is float and parsed is int):
            hint = "; remove the quotes"
    return f"expected {spell(kind)}, got {spell_value(value)}{hint}"
