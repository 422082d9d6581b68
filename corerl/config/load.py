"""Load a TOML file and dotted overrides into one frozen Config, and dump it; all problems are reported at once."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from attrs import evolve

from corerl.config.options import READ_AT_START
from corerl.config.schema import Config
from corerl.config.structuring import Keys, Problem, deeper, try_structure
from corerl.config.toml_text import class_fields, escaped, parse_toml, to_plain
from corerl.errors import ConfigError
from corerl.messages import LONGEST, did_you_mean_path, short_repr, shorten

T = TypeVar("T")

CONFIG_FILE = "config.toml"  # in a run's directory, written before it starts
KEY = re.compile(r"[\w.-]*")  # a dotted key without quotes
HALF_SURROGATE = re.compile("[\ud800-\udfff]")
# Settings whose values no message shows, and how they are set.
SECRETS: Mapping[Keys, str] = {
    ("cluster", "environment"): 'set cluster.environment.NAME="VALUE"',
    ("cluster", "secrets"): """set cluster.secrets='["NAME"]'""",
}
# The tables of what only one plugin knows, and what it is, by the table of what all plugins of its kind have.
PLUGINS = {
    "algorithm": {"algorithms": "algorithm"},
    "backend": {"backends": "backend"},
    "rollout": {"engines": "engine", "samplers": "sampler"},
    "weights": {"transports": "transport"},
    "model": {"pictures": "reader of pictures"},
}


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply overrides `a.b.c=VALUE` in order, and check every key and value.

    VALUE is TOML; anything that is not valid TOML is taken as a string. An override replaces the whole value at its
    path. Raises ConfigError with one line for each problem.
    """
    return _config(read_toml(path), overrides)[0]


def load_with_table(
    path: Path | str, overrides: Sequence[str] = (), *, table: str, options: type[T]
) -> tuple[Config, T]:
    """Like `load_config`, of a file with one more table, that of a command: with what it says, as the frozen attrs
    class `options`."""
    return _config(read_toml(path), overrides, table=table, options=options)


def read_toml(path: Path | str) -> dict[str, Any]:
    """The plain data of a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # -sig: Windows editors may write a BOM
    except FileNotFoundError:
        fault = f"no such file; pass the path of a TOML file{did_you_mean_path(path)}"
    except (OSError, UnicodeDecodeError) as error:
        fault = f"cannot be read ({getattr(error, 'strerror', error)}); pass the path of a TOML file"
    except (ValueError, RecursionError) as error:  # TOMLDecodeError; too many digits; nested too deeply
        advice = next((f"; {advice}" for start, advice in ADVICE.items() if str(error).startswith(start)), "")
        fault = f"is not valid TOML: {error}{advice}"
    raise ConfigError(f"{path}: {fault}")


def config_of(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Like `load_config`, from plain data such as a checkpoint's; `data` is not changed."""
    return _config(copy.deepcopy(dict(data)), overrides)[0]


def as_config(source: Config | Mapping[str, Any] | Path | str, overrides: Sequence[str] = ()) -> Config:
    """A config, from one, from plain data or from the path of a TOML file, with overrides."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: got the text {short_repr(overrides)}, wanted a list of texts")
    if isinstance(source, (str, Path)):
        return load_config(source, overrides)
    if isinstance(source, Config):
        return config_of(to_plain(source), overrides) if overrides else source
    if not isinstance(source, Mapping):
        raise ConfigError(f"got a {type(source).__name__}, wanted a corerl.Config, a mapping, or a TOML file's path")
    return config_of(source, overrides)


def _config(
    data: dict[str, Any], overrides: Sequence[str], *, table: str = "", options: type = Config
) -> tuple[Config, Any]:
    """The config, and the `options` that a further `table` says."""
    lines: list[str] = []
    applied: list[tuple[Keys, str]] = []
    for text in overrides:
        try:
            applied.append((_apply(text, data), text))
        except ConfigError as error:
            lines.append(error.message)
    own, problems = try_structure(data.pop(table, {}), options) if table else (None, [])
    config, others = try_structure(data, Config)
    problems = [*(evolve(problem, keys=(table, *problem.keys)) for problem in problems), *others]
    lines += [_concealed(problem).line() + _elsewhere(problem) + _blame(problem.keys, applied) for problem in problems]
    if config is None or lines:
        raise ConfigError("\n".join(lines))
    return config, own


# What to do about common mistakes, by the start of tomllib's message.
ADVICE = {
    "Invalid value": 'put text in quotes, as in name = "NAME", and write true and false in lower case',
    "Invalid statement": "wanted tables such as [run], and below them keys such as steps = 10",
    "Expected '=' after a key": "wanted tables such as [run], and below them keys such as steps = 10",
}


def dump_toml(config: Config | Mapping[str, Any]) -> str:
    """The whole configuration, or its plain data, as TOML, defaults included; loading it gives an equal one."""
    return escaped(tomli_w.dumps(to_plain(config)))


def recorded(config: Config) -> Config:
    """The config as a run writes it down, which others may read: the values of `cluster.environment` are left out, but
    for those that Ray logs anyway, and its names stand under `cluster.secrets`. So it can be loaded again where these
    variables are set."""
    cluster = config.cluster
    shown = {name: value for name, value in cluster.environment.items() if READ_AT_START.match(name)}
    names = tuple(dict.fromkeys([*cluster.secrets, *(name for name in cluster.environment if name not in shown)]))
    return evolve(config, cluster=evolve(cluster, environment=shown, secrets=names))


# ---- overrides -------------------------------------------------------------------------------------------------------


def _apply(text: str, data: dict[str, Any]) -> Keys:
    """Apply one override to `data`; returns the keys that it sets."""
    key, equals, value = text.partition("=")
    said, keys = short_repr(key_of(text)), _keys(key)
    if not equals or not keys:
        raise ConfigError(f"override {said}: expected KEY=VALUE with a dotted key, such as run.steps=10")
    if HALF_SURROGATE.search(text):  # what the command line makes of bytes that are no UTF-8
        raise ConfigError(f"override {said}: is not UTF-8 text, which config.toml must be")
    table: Any = data
    for depth, name in enumerate(keys[:-1], start=1):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {said}: {'.'.join(keys[:depth])} is not a table; override it as a whole")
    table[keys[-1]] = parse_toml(value)
    return keys


def _keys(dotted: str) -> tuple[str, ...]:
    """The parts of a dotted key; () for any other text."""
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
    """The end of a message about an unknown key: the path of a setting of that name elsewhere, or the tables that only
    one plugin knows."""
    key = str(problem.keys[-1])
    is_table = problem.text.startswith("unknown key") and key in class_fields(Config)
    if not problem.unknown and not is_table:
        return ""
    text = ""
    if is_table:
        above = ".".join(part for part in problem.keys[:-1] if isinstance(part, str))
        text = f"{' ' if problem.text.endswith('?') else '; '}{key} is a table of its own, outside of {above}"
    elif found := deeper(Config, key):
        text = f"; there is {' and '.join(found[:2])}"
    if len(problem.keys) == 2:
        for table, noun in PLUGINS.get(str(problem.keys[0]), {}).items():
            text += f"; what only one {noun} knows is in a table of its own, {table}.NAME"
    return text


def _concealed(problem: Problem) -> Problem:
    """The same problem without the value of a setting that holds secrets."""
    advice = SECRETS.get(problem.keys[:2])
    if advice is None or not problem.text.startswith("expected"):
        return problem
    return evolve(problem, text=f"{problem.text.partition(', got ')[0]}; {advice}")


def _blame(keys: Keys, applied: Iterable[tuple[Keys, str]]) -> str:
    """Name the last override that set the value at `keys`, a part of it, or a table that contains it."""
    for set_by, text in reversed(list(applied)):
        shared = min(len(keys), len(set_by))
        if keys[:shared] == set_by[:shared]:
            return f" (override {shorten(key_of(text), LONGEST)})"
    return ""


def key_of(override: str) -> str:
    """What messages show of an override, whose value may be a secret; of one without an equals sign, the beginning that
    may be a key."""
    return override.partition("=")[0] if _keys(override.partition("=")[0]) else KEY.match(override)[0]  # type: ignore[index]
