"""Strict structuring of plain data into frozen attrs classes, reporting every problem and not only the first.

"false" is not a bool, and 1.9 is not an int. An int is accepted as a float, an array as a tuple. Validators of all
fields run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

import attrs
from attrs import frozen
from cattrs import Converter
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError, IterableValidationNote
from cattrs.gen import make_dict_structure_fn, override

from corerl.config.words import choices, class_fields, is_union, parse_toml, spell, spell_value, to_plain
from corerl.errors import ConfigError
from corerl.messages import LONGEST, LONGEST_LINE, did_you_mean, nearest, short_repr, shorten, shorten_inside

T = TypeVar("T")
Keys = tuple[str | int, ...]  # the parts of a dotted path; integers index arrays
SHOWN = 20  # parts of an array or table that are reported if they do not fit
FITTINGS = 4  # what is wrong is removed, what is then missing is made empty, and then validators of tables speak


class _Wrong(ValueError):
    """A value that does not fit; the message goes after its path. `within` as in Problem."""

    within: str = ""


_ERRORS = (ClassValidationError, IterableValidationError, _Wrong)


@frozen
class Problem:
    keys: Keys
    text: str
    within: str = ""  # the setting inside `keys` that the value seems to be for

    def line(self, prefix: str = "") -> str:
        """The problem with its dotted path, below `prefix`."""
        path = prefix
        for key in self.keys:
            if isinstance(key, int):
                path += f"[{key}]"
            else:
                name = shorten(key, LONGEST)
                path += ("." if path else "") + (name if re.fullmatch(r"[\w-]+", name) else f'"{name}"')
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
    try:
        return _converter().structure(data, cls), []
    except _ERRORS as error:
        return None, list(_walk(error, ()))


def fitting(data: Mapping[str, Any], cls: type[T]) -> T | None:
    """The instance of what fits of plain data: what is wrong has its default, and required text is empty. None if there
    is none."""
    rest = to_plain(data)
    for _ in range(FITTINGS):
        value, problems = try_structure(rest, cls)
        if value is not None:
            return value
        for problem in problems:
            _leave_out(problem.keys, rest)
    return None


def _leave_out(keys: Keys, data: dict[str, Any]) -> None:
    """Remove a setting, or make it empty text if it is missing."""
    while keys and isinstance(keys[-1], int):  # a whole array, whose other items would have other numbers
        keys = keys[:-1]
    if not keys:
        return
    table: Any = data
    for key in keys[:-1]:
        table = table.setdefault(key, {}) if isinstance(table, dict) else table[key]
    if keys[-1] in table:
        del table[keys[-1]]
    else:
        table[keys[-1]] = ""


def is_setting(keys: Keys, cls: type) -> bool:
    """Whether a dotted path leads to a setting of an attrs class, or into one of its tables of any content."""
    kinds: list[Any] = [cls]
    for key in keys:
        if any(_is_a(kind, Mapping) for kind in kinds):
            return True
        fields = [class_fields(kind).get(str(key)) for kind in kinds if attrs.has(kind)]
        kinds = [arm for field in fields if field for arm in _arms(field.type)]
    return bool(kinds)


def _arms(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if is_union(kind) else (kind,)


@cache
def _converter() -> Converter:
    converter = Converter(detailed_validation=True, forbid_extra_keys=True)
    for kind in (bool, int, float, str, Enum):
        converter.register_structure_hook(kind, _scalar)
    converter.register_structure_hook_factory(_is_literal, lambda kind: _scalar)
    converter.register_structure_hook_factory(lambda kind: _is_a(kind, Mapping), _table_hook)
    converter.register_structure_hook_factory(lambda kind: _is_a(kind, (list, tuple, Sequence)), _array_hook)
    converter.register_structure_hook_factory(is_union, _union_hook)
    converter.register_structure_hook_factory(attrs.has, _class_hook)
    return converter


def _is_literal(kind: Any) -> bool:
    return get_origin(kind) is Literal


def _is_a(kind: Any, parent: type | tuple[type, ...]) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, parent) and not issubclass(origin, str)


def _scalar(value: Any, kind: Any) -> Any:
    if allowed := choices(kind):
        for choice in allowed:
            if choice == value and type(choice) is type(value):
                return kind(value) if isinstance(kind, type) else value
        raise _Wrong(_mismatch(value, kind))
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise _Wrong(_mismatch(value, kind)) from None
    if type(value) is not kind:
        raise _Wrong(_mismatch(value, kind))
    if kind is float and math.isnan(value):
        raise _Wrong("expected number, got nan")
    if kind is str and "\0" in value:  # no path, variable or token may have one, and not every library checks
        raise _Wrong(f"expected string without NUL characters, got {short_repr(value)}")
    return value


def _class_hook(cls: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    fields = {name: override(struct_hook=_field_hook(field, converter)) for name, field in class_fields(cls).items()}
    # A table's first setting is its main one, such as the name of what its others are for.
    main, main_kinds = next(((name, _arms(field.type)) for name, field in class_fields(cls).items()), ("", ()))
    build = make_dict_structure_fn(
        cls, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True, **cast(Any, fields)
    )

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            wrong = _Wrong(_mismatch(value, cls))
            wrong.within = main if type(value) in main_kinds else ""
            raise wrong
        return build(value, cls)

    return hook


def _field_hook(field: attrs.Attribute[Any], converter: Converter) -> Callable[[Any, Any], Any]:
    """Structure one field and run its validator at once: attrs itself would stop at the first failing field."""

    def hook(raw: Any, kind: Any) -> Any:
        try:
            value = converter.structure(raw, kind)
        except _ERRORS:
            raise
        except (ValueError, TypeError, LookupError) as error:  # from a type that does its own conversion
            raise _Wrong(_text(error)) from error
        if field.validator is not None and field.converter is None:
            try:
                field.validator(None, field, value)
            except AttributeError:
                pass  # it reads other fields, so it can only run when the instance is made
            except (ValueError, TypeError, LookupError) as error:
                raise _Wrong(_text(error)) from error
        return value

    return hook


def _table_hook(kind: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    _, inner = get_args(kind) or (str, Any)

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _Wrong(_mismatch(value, kind))
        return dict(zip(value, _each(value, value.values(), [inner] * len(value), converter), strict=True))

    return hook


def _array_hook(kind: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    is_tuple = _is_a(kind, tuple)
    kinds = get_args(kind) or (Any, ...)
    fixed = is_tuple and kinds[-1] is not Ellipsis

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _Wrong(_mismatch(value, kind))
        if fixed and len(value) != len(kinds):
            raise _Wrong(f"expected {spell(kind)}, got {len(value)}")
        items = _each(range(len(value)), value, kinds if fixed else [kinds[0]] * len(value), converter)
        return tuple(items) if is_tuple else items

    return hook


def _each(keys: Iterable[Any], values: Iterable[Any], kinds: Iterable[Any], converter: Converter) -> list[Any]:
    """Structure all parts of an array or table; raise one error for the parts that fail, of many for the first ones."""
    done, errors = [], []
    for key, value, kind in zip(keys, values, kinds, strict=True):
        try:
            done.append(converter.structure(value, kind))
        except (*_ERRORS, ValueError, TypeError, LookupError) as error:
            error.add_note(IterableValidationNote(f"at {key!r}", key, kind))
            errors.append(error)
            if len(errors) == SHOWN:  # an array of the wrong kind may have millions, each of which takes 50 us
                errors.append(_Wrong(f"{SHOWN} of its parts do not fit; those behind them are not checked"))
                break
    if errors:
        raise IterableValidationError("parts do not fit", errors, list)
    return done


def _union_hook(kind: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    arms = [arm for arm in get_args(kind) if arm is not type(None)]
    tables = [arm for arm in arms if attrs.has(arm)]

    def hook(value: Any, _: Any) -> Any:
        if value is None and len(arms) < len(get_args(kind)):
            return None
        # if only one arm can be meant, its own errors say more than "expected this or that"
        meant = tables if len(tables) == 1 and isinstance(value, Mapping) else arms
        if len(meant) == 1:
            return converter.structure(value, meant[0])
        for arm in arms:
            try:
                return converter.structure(value, arm)
            except (*_ERRORS, ValueError, TypeError, LookupError):
                continue  # the next arm may fit
        raise _Wrong(_mismatch(value, kind))

    return hook


# ---- problems in words -----------------------------------------------------------------------------------------------


def _walk(error: BaseException, keys: Keys) -> Iterator[Problem]:
    """Every problem in a tree of cattrs' exception groups, in the order of the classes' fields."""
    if isinstance(error, ClassValidationError):
        noted, bare = error.group_exceptions()
        for part, attribute in noted:
            if isinstance(part, KeyError):  # a missing key; errors of a field's value are a _Wrong or a group
                yield from _missing(class_fields(error.cl)[attribute.name], keys)
            else:
                yield from _walk(part, (*keys, attribute.name))
        for part in bare:
            yield from _unknown(part, keys) if isinstance(part, ForbiddenExtraKeysError) else _walk(part, keys)
    elif isinstance(error, IterableValidationError):
        noted_items, bare = error.group_exceptions()
        for part, item in noted_items:
            yield from _walk(part, (*keys, item.index))
        for part in bare:
            yield from _walk(part, keys)
    else:
        yield Problem(keys, _text(error), within=error.within if isinstance(error, _Wrong) else "")


def _missing(field: attrs.Attribute[Any], keys: Keys) -> Iterator[Problem]:
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


def _unknown(error: ForbiddenExtraKeysError, keys: Keys) -> Iterator[Problem]:
    known = list(class_fields(error.cl))
    if (more := len(error.extra_fields) - SHOWN) > 0:
        yield Problem(keys, f"has {more} more unknown keys")
    for key in sorted(error.extra_fields)[:SHOWN]:
        near = next(iter(deeper(error.cl, key)), "") or nearest(key, known)
        advice = f"did you mean {near!r}?" if near else f"known: {', '.join(known) or 'none'}"
        yield Problem((*keys, key), f"unknown key; {advice}")


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
    # What was meant for a table may hold a variable of the environment, so a message does not show it.
    tabular = isinstance(value, str) and value.lstrip().startswith("{")
    got = "a string that is no valid inline table" if tabular else spell_value(value)
    return f"expected {spell(kind)}, got {got}{hint}"
