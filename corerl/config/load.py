"""Load a TOML file and dotted overrides into one frozen Config, and dump it; all problems are reported at once."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from attrs import evolve

from corerl.config.schema import Config
from corerl.config.structuring import Keys, Problem, deeper, fitting, is_setting, structure, try_structure
from corerl.config.variables import READ_AT_START
from corerl.config.words import class_fields, parse_toml, to_plain
from corerl.errors import ConfigError
from corerl.messages import LONGEST, did_you_mean_path, short_repr, shorten

__all__ = ["as_config", "config_of", "dump_toml", "load_config", "recorded", "structure", "to_plain", "without_value"]

CONFIG_FILE = "config.toml"  # in a run's directory, written before it starts
SECRET = ("cluster", "environment")  # the table whose values no message shows
NAMES = ("cluster", "secrets")  # which may be taken for the place of the values themselves
CONCEALED = (SECRET[:1], SECRET, NAMES)  # settings of which no message shows an override
KEY = re.compile(r"[\w.-]*")  # a dotted key without quotes
UNKNOWN = "unknown key; known: "  # how a problem begins for which there is no better advice
# Tables of what all plugins of a kind have in common, with those of what only one knows.
PLUGINS = {
    "algorithm": ("algorithms",),
    "backend": ("backends",),
    "rollout": ("engines", "samplers"),
    "weights": ("transports",),
}
DEEPEST = 32  # levels of tables and arrays
More = Callable[[Config], Iterable[str]]  # further problems of a config that has some, a line for each


def nothing_more(config: Config) -> Iterable[str]:
    return ()


def load_config(path: Path | str, overrides: Sequence[str] = (), *, more: More = nothing_more) -> Config:
    """Read a TOML file, apply overrides `a.b.c=VALUE` in order, and check every key and value.

    VALUE is TOML; anything that is not valid TOML is taken as a string. An override replaces the whole value at its
    path.
    Raises ConfigError with one line for each problem, followed by what `more` tells of the settings that fit.
    """
    lines: list[str] = []
    data: dict[str, Any] = {}
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # -sig: Windows editors may write a BOM
    except FileNotFoundError:
        lines.append(f"{path}: no such file; pass the path of a TOML file{did_you_mean_path(path)}")
    except OSError as error:
        lines.append(f"{path}: cannot be read ({error.strerror}); pass the path of a TOML file")
    except UnicodeDecodeError as error:
        lines.append(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); pass the path of a TOML file")
    except tomllib.TOMLDecodeError as error:
        lines.append(f"{path}: is not valid TOML: {error}{_mending(str(error))}")
    except RecursionError:
        lines.append(f"{path}: is nested more deeply than can be read; at most {DEEPEST} levels are allowed")
    except ValueError:  # of int(), which Python guards against numbers that take for ever
        lines.append(f"{path}: has a number of more digits than can be read; integers have at most 64 bits")
    return _config(data, overrides, lines, more)


def config_of(data: Mapping[str, Any], overrides: Sequence[str] = (), *, more: More = nothing_more) -> Config:
    """Like `load_config`, from plain data such as a checkpoint's; `data` is not changed."""
    return _config(copy.deepcopy(dict(data)), overrides, [], more)


def as_config(
    source: Config | Mapping[str, Any] | Path | str, overrides: Sequence[str] = (), *, more: More = nothing_more
) -> Config:
    """A config, from one, from plain data or from the path of a TOML file, with overrides. Raises ConfigError as
    `load_config` does, also for what is none of these."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: got the text {short_repr(overrides)}, wanted a list of texts")
    if isinstance(source, (str, Path)):
        return load_config(source, overrides, more=more)
    if isinstance(source, Config):
        return config_of(to_plain(source), overrides, more=more) if overrides else source
    if not isinstance(source, Mapping):
        raise ConfigError(f"got a {type(source).__name__}, wanted a corerl.Config, a mapping, or a TOML file's path")
    return config_of(source, overrides, more=more)


def _config(data: dict[str, Any], overrides: Sequence[str], lines: list[str], more: More) -> Config:
    """Build the Config. `lines` are the problems so far; if there are any, `data` could not be read."""
    readable = not lines
    applied: list[tuple[Keys, str]] = []
    overrides, spaced = _joined(overrides)
    lines += spaced
    for text in overrides:
        try:
            applied.append((_apply(text, data), text))
        except ConfigError as error:
            lines.append(error.message)
    too_large = [] if not readable else [_concealed(problem, data) for problem in _too_large(data)]
    lines += [problem.line() + _blame(problem.keys, applied) for problem in too_large]
    if readable and not too_large:
        config, problems = try_structure(data, Config)
        told = [evolve(each, text=each.text + _elsewhere(each)) for each in problems]
        lines += [_concealed(problem, data).line() + _blame(problem.keys, applied) for problem in told]
        if config is not None and not lines:
            return config
        if (rest := fitting(data, Config)) is not None:
            lines += more(rest)
    raise ConfigError("\n".join(lines))


# What to do about what tomllib says of the mistakes that are made most.
MENDING = {
    "Invalid value": 'put text in quotes, as in name = "NAME", and write true and false in lower case',
    "Cannot overwrite a value": "set each key once",
    "Cannot declare": "begin each table once, and put all of its keys there",
    "Invalid statement": "wanted tables such as [run], and below them keys such as steps = 10",
    "Expected '=' after a key": "wanted tables such as [run], and below them keys such as steps = 10",
}


def _mending(told: str) -> str:
    return next((f"; {advice}" for begin, advice in MENDING.items() if told.startswith(begin)), "")


# What TOML lets stand in strings and a terminal obeys: C1 controls and marks that turn the direction of text around.
_CONTROLS = re.compile("[\x80-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def dump_toml(config: Config | Mapping[str, Any]) -> str:
    """The whole configuration, or its plain data, as TOML, defaults included; loading it gives an equal one."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", tomli_w.dumps(to_plain(config)))


def recorded(config: Config) -> Config:
    """The config as a run writes it down, which others may read: the values of `cluster.environment` are left out, but
    for those that Ray logs anyway, and its names stand under `cluster.secrets`. So it can be loaded again where these
    variables are set."""
    cluster = config.cluster
    shown = {name: value for name, value in cluster.environment.items() if READ_AT_START.match(name)}
    names = tuple(dict.fromkeys([*cluster.secrets, *(name for name in cluster.environment if name not in shown)]))
    return evolve(config, cluster=evolve(cluster, environment=shown, secrets=names))


def _too_large(data: Mapping[str, Any]) -> Iterator[Problem]:
    """What is nested too deeply, and numbers that are no 64-bit integers: TOML promises no others, and neither Python
    nor the libraries that settings are passed on to can write all of them."""
    left: list[tuple[Keys, Any]] = [((), data)]
    while left:
        keys, value = left.pop()
        if len(keys) > DEEPEST:
            yield Problem(keys[:3], f"is nested more than {DEEPEST} levels deep; use fewer")
            return
        items = ((str(key), item) for key, item in value.items()) if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:  # an array may have millions: paths are made only where they are needed
            if isinstance(item, Mapping | list):
                left.append(((*keys, key), item))
            elif type(item) is int and not -(2**63) <= item < 2**63:
                path = (*keys, key)
                got = short_repr(item) if is_setting(path, Config) else "a larger one"  # which may be a secret
                yield Problem(path, f"expected an integer of at most 64 bits, got {got}")


# ---- overrides -------------------------------------------------------------------------------------------------------


def _joined(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides without those that are written as in TOML, with spaces around the sign, and a line for each of
    these."""
    rest, lines = list(overrides), []
    while "=" in rest:
        at = rest.index("=")
        key = shorten("".join(rest[max(0, at - 1) : at]), LONGEST)
        lines.append(f"override '{without_value(key)} = ...': write KEY=VALUE as one word, without spaces around the =")
        del rest[max(0, at - 1) : at + 2]
    return rest, lines


def _apply(text: str, data: dict[str, Any]) -> Keys:
    """Apply one override to `data`; returns the keys that it sets."""
    said = short_repr(without_value(text))
    if not text.isprintable() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"override {said}: is not UTF-8 text")
    key, equals, value = text.partition("=")
    keys = _keys(key)
    if not equals or not keys:
        raise ConfigError(f"override {said}: expected KEY=VALUE with a dotted key, such as run.steps=10")
    table: Any = data
    for depth, name in enumerate(keys[:-1], start=1):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            path = shorten(".".join(keys[:depth]), LONGEST)
            raise ConfigError(f"override {said}: {path} is not a table; override it as a whole")
    table[keys[-1]] = parse_toml(value)
    return keys


def _keys(dotted: str) -> tuple[str, ...]:
    """The parts of a dotted key; () if it is none."""
    try:
        nested: Any = tomllib.loads(f"{dotted} = 0")  # handles quoted keys too
    except tomllib.TOMLDecodeError:
        return ()
    keys: list[str] = []
    while isinstance(nested, dict):
        if len(nested) != 1:
            return ()
        ((name, nested),) = nested.items()
        keys.append(name)
    return tuple(keys)


def _elsewhere(problem: Problem) -> str:
    """The end of a message about an unknown key that has no like in its table: where it is, or where settings are that
    only one plugin knows."""
    if not problem.text.startswith(UNKNOWN):
        return ""
    key = str(problem.keys[-1])
    found = [key] if key in class_fields(Config) else deeper(Config, key)  # a table of all rather than others inside
    said = f"; there is {' and '.join(found[:2])}" if found else ""
    if len(problem.keys) == 2 and problem.keys[0] in PLUGINS:
        for table in PLUGINS[problem.keys[0]]:
            said += f"; what only one {table[:-1]} knows is in a table of its own, {table}.NAME"
    return said


def _concealed(problem: Problem, data: Mapping[str, Any]) -> Problem:
    """The same problem, without the values of variables of the environment, which may be secrets."""
    keys = problem.keys
    if keys[:2] in (SECRET, NAMES) and len(keys) > 2:
        return Problem(keys, "expected string, got something else; put it in quotes")
    if keys == NAMES and not isinstance(data["cluster"]["secrets"], list):
        return Problem(keys, """expected array of strings, got something else; set cluster.secrets='["NAME"]'""")
    if keys in (SECRET[:1], SECRET):
        value: Any = data
        for key in keys:
            value = value.get(key, {})
        if not isinstance(value, Mapping):  # what is wrong with a table are its names
            return Problem(keys, 'expected table, got something else; set cluster.environment.NAME="VALUE"')
    return problem


def _blame(keys: Keys, applied: Iterable[tuple[Keys, str]]) -> str:
    """Name the last override that set the value at `keys`, a part of it, or a table that contains it."""
    for set_by, text in reversed(list(applied)):
        shared = min(len(keys), len(set_by))
        if keys[:shared] == set_by[:shared]:
            return f" (override {shorten(without_value(text), LONGEST)})"
    return ""


def without_value(override: str) -> str:
    """The override without its value, if that may be a secret: for `cluster.environment` or `cluster.secrets`, for what
    is no setting and so may be either in another spelling, and in a table. Of what is no KEY=VALUE, only the beginning
    that a key may be is shown."""
    key, equals, value = override.partition("=")
    keys = _keys(key)
    if equals and keys:
        hidden = keys[:2] in CONCEALED or not is_setting(keys, Config) or "{" in value
        return f"{key}=..." if hidden else override
    shown = KEY.match(override)[0]  # type: ignore[index]  # it matches the empty string too
    rest = override[len(shown) :]
    return shown + ("=..." if rest.startswith("=") else "..." if rest else "")
