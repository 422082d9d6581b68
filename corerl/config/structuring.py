"""Strict structuring of plain data into frozen attrs classes, reporting every problem and not only the first.

"false" is not a bool, and 1.9 is not an int. An int is accepted as a float, an array as a tuple. Validators of all
fields run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from typing import Any, TypeVar, get_args, get_origin

import attrs
from attrs import evolve, frozen

from corerl.config.toml_text import choices, class_fields, is_union, parse_toml, spell, spell_value, toml_key
from corerl.errors import ConfigError
from corerl.messages import LONGEST, LONGEST_LINE, did_you_mean, nearest, short_repr, shorten, shorten_inside

T = TypeVar("T")
Keys = tuple[str | int, ...]  # the parts of a dotted path; integers index arrays


@frozen
class Problem:
    keys: Keys
    text: str
    within: str = ""  # the setting inside `keys` that the value seems to be for
    unknown: bool = False  # the key is none of its table's, nor similar to one

    def line(self, prefix: str = "") -> str:
        """The problem with its dotted path, below `prefix`."""
        path = prefix
        for key in self.keys:
            path += f"[{key}]" if isinstance(key, int) else "." * bool(path) + shorten(toml_key(key), LONGEST)
        text = shorten_inside(self.text, LONGEST_LINE) + f"; did you mean {path}.{self.within}?" * bool(self.within)
        return f"{path}: {text}" if path else text


class _Wrong(ValueError):
    """What does not fit, with keys inside the value that was read."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems


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
    try:
        found: T = _read(data, cls)
    except _Wrong as error:
        return None, list(error.problems)
    return found, []


def _arms(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if is_union(kind) else (kind,)


def _read(value: Any, kind: Any) -> Any:
    """The value as this type. Raises _Wrong."""
    if attrs.has(kind):
        return _read_class(value, kind)
    if is_union(kind):
        return _read_union(value, kind)
    if _is_a(kind, (list, tuple, Sequence)):
        return _read_array(value, kind)
    if _is_a(kind, Mapping):
        return _read_table(value, kind)
    return value if kind is Any else _read_scalar(value, kind)


def _is_a(kind: Any, parent: type | tuple[type, ...]) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, parent) and not issubclass(origin, str)


def _read_scalar(value: Any, kind: Any) -> Any:
    if allowed := choices(kind):
        for choice in allowed:
            if choice == value and type(choice) is type(value):
                return kind(value) if isinstance(kind, type) else value
        raise _wrong(_mismatch(value, kind))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _wrong(_mismatch(value, kind))
    if kind is float and math.isnan(value):
        raise _wrong("expected number, got nan")
    if kind is str and "\0" in value:  # no path, variable or token may have one, and not every library checks
        raise _wrong(f"expected string without NUL characters, got {short_repr(value)}")
    return value


def _read_class(value: Any, cls: type) -> Any:
    fields = class_fields(cls)
    if not isinstance(value, Mapping):
        # A table's first setting is its main one, such as the name of what its others are for.
        main = next(iter(fields), "")
        meant = main and type(value) in _arms(fields[main].type)
        raise _wrong(_mismatch(value, cls), within=main if meant else "")
    done: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, field in fields.items():
        if name in value:
            try:
                done[field.alias or name] = _read_field(value[name], field)
            except Exception as error:  # a type's own conversion, or a validator, may raise anything
                problems += _inside(name, error)
        elif field.default is attrs.NOTHING:
            problems += _missing(field)
    problems += _unknown(value.keys() - fields.keys(), cls)
    if not problems:
        try:
            return cls(**done)
        except Exception as error:  # of a validator that reads several fields
            problems += _problems_of(error)
    raise _Wrong(*problems)


def _read_field(raw: Any, field: attrs.Attribute[Any]) -> Any:
    """Read one field and run its validator at once: attrs itself would stop at the first failing field."""
    value = _read(raw, Any if field.type is None else field.type)
    if field.validator is not None and field.converter is None:
        with contextlib.suppress(AttributeError):  # it reads other fields, so it can only run with the whole instance
            field.validator(None, field, value)
    return value


def _read_table(value: Any, kind: Any) -> dict[Any, Any]:
    _, inner = get_args(kind) or (str, Any)
    if not isinstance(value, Mapping):
        raise _wrong(_mismatch(value, kind))
    return dict(zip(value, _each(value, value.values(), [inner] * len(value)), strict=True))


def _read_array(value: Any, kind: Any) -> list[Any] | tuple[Any, ...]:
    is_tuple = _is_a(kind, tuple)
    kinds = get_args(kind) or (Any, ...)
    fixed = is_tuple and kinds[-1] is not Ellipsis
    if not isinstance(value, (list, tuple)):
        raise _wrong(_mismatch(value, kind))
    if fixed and len(value) != len(kinds):
        raise _wrong(f"expected {spell(kind)}, got {len(value)}")
    items = _each(range(len(value)), value, kinds if fixed else [kinds[0]] * len(value))
    return tuple(items) if is_tuple else items


def _each(keys: Iterable[Any], values: Iterable[Any], kinds: Iterable[Any]) -> list[Any]:
    """Read all parts of an array or table; raise one error for all parts that fail."""
    done: list[Any] = []
    problems: list[Problem] = []
    for key, value, kind in zip(keys, values, kinds, strict=True):
        try:
            done.append(_read(value, kind))
        except (ValueError, TypeError, LookupError) as error:
            problems += _inside(key, error)
    if problems:
        raise _Wrong(*problems)
    return done


def _read_union(value: Any, kind: Any) -> Any:
    arms = [arm for arm in get_args(kind) if arm is not type(None)]
    tables = [arm for arm in arms if attrs.has(arm)]
    if value is None and len(arms) < len(get_args(kind)):
        return None
    # if only one arm can be meant, its own errors say more than "expected this or that"
    meant = tables if len(tables) == 1 and isinstance(value, Mapping) else arms
    if len(meant) == 1:
        return _read(value, meant[0])
    for arm in arms:
        with contextlib.suppress(ValueError, TypeError, LookupError):  # the next arm may fit
            return _read(value, arm)
    raise _wrong(_mismatch(value, kind))


# ---- problems in words -----------------------------------------------------------------------------------------------


def _wrong(text: str, within: str = "") -> _Wrong:
    return _Wrong(Problem((), text, within))


def _problems_of(error: Exception) -> Sequence[Problem]:
    return error.problems if isinstance(error, _Wrong) else [Problem((), _text(error))]


def _inside(key: str | int, error: Exception) -> list[Problem]:
    return [evolve(problem, keys=(key, *problem.keys)) for problem in _problems_of(error)]


def _missing(field: attrs.Attribute[Any], keys: Keys = ()) -> Iterator[Problem]:
    """The problem for a missing required field; for a table, one for each required field in it."""
    here = (*keys, field.name)
    kind: Any = field.type
    inner = class_fields(kind).values() if attrs.has(kind) else ()
    required = [part for part in inner if part.default is attrs.NOTHING]
    for part in required:
        yield from _missing(part, here)
    if not required:
        help_text = field.metadata.get("help", "")
        yield Problem(here, f"required but missing; set {spell(kind)}" + (f": {help_text}" * bool(help_text)))


def _unknown(extra: Iterable[str], cls: type) -> Iterator[Problem]:
    known = list(class_fields(cls))
    for key in sorted(extra):
        near = next(iter(deeper(cls, key)), "") or nearest(key, known)
        advice = f"did you mean {near!r}?" if near else f"known: {', '.join(known) or 'none'}"
        yield Problem((key,), f"unknown key; {advice}", unknown=not near)


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
    message = str(error.args[0] if error.args else error) or type(error).__name__
    return " ".join(message.split())


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
