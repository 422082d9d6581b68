"""`corerl plugins [KIND] [--json]`: what is installed of every kind, and why some cannot run.

`corerl options NAME [--kind KIND]`: every setting of a plugin as TOML with its default, ready to paste; of a run's file
all that it has."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from enum import StrEnum
from typing import Any

from attrs import asdict, frozen

from corerl.config import Config, class_fields, load_config, toml_key, toml_value
from corerl.errors import PluginBroken, PluginConflict, PluginError, PluginIncompatible, PluginNotFound, UserError
from corerl.messages import did_you_mean, install_hint, one_line, printable
from corerl.plan import filled_in
from corerl.plugin import API, EXTRAS, Kind, Loaded, installed_names, load, locate, scan
from corerl_doctor.help_texts import comment, settings_with_help

SELECTED_BY = {
    Kind.BACKENDS: "backend.name",
    Kind.ENGINES: "rollout.engine",
    Kind.SAMPLERS: "rollout.sampler",
    Kind.ALGORITHMS: "algorithm.name",
    Kind.TRANSPORTS: "weights.transport",
    Kind.PICTURES: "model.pictures",
}


class Status(StrEnum):
    OK = "ok"
    BROKEN = "broken"
    INCOMPATIBLE = "incompatible"
    CONFLICT = "conflict"


@frozen(kw_only=True)
class Installed:
    """An entry point that was found, and whether it can be used."""

    name: str
    distribution: str
    version: str
    value: str
    status: Status
    reason: str = ""  # empty if the status is ok
    api: tuple[int, int] | None = None  # None if the spec could not be loaded
    summary: str = ""


def installed(kind: Kind) -> list[Installed]:
    """Every plugin of this kind on sys.path, sorted by name. Imports each spec; broken plugins are listed too."""
    found = []
    for entry in scan(kind):
        status, reason, api, summary = Status.OK, "", None, ""
        try:
            spec = load(kind, f"{entry.distribution}:{entry.name}").spec
            api, summary = spec.api, spec.summary
            locate(kind, entry.name)
        except PluginIncompatible as error:
            status, api = Status.INCOMPATIBLE, error.api
            reason = f"written for API {_dotted(error.api)}, but this corerl supports {_dotted(API)}"
        except PluginBroken as error:
            status, reason = Status.BROKEN, one_line(error.__cause__) if error.__cause__ else error.message
        except PluginConflict as error:
            status, reason = Status.CONFLICT, error.message.partition(" is ")[2]
        found.append(Installed(**asdict(entry), status=status, reason=reason, api=api, summary=summary))
    return found


def known_names(kind: Kind) -> list[str]:
    """The names of the plugins of this kind that are installed, and of CoreRL's own that can be."""
    return [*installed_names(kind), *EXTRAS[kind]]


def kinds_of(name: str) -> list[Kind]:
    """The kinds that have an installed or installable plugin of this name; of 'package.module:SPEC', the spec's."""
    found = [kind for kind in Kind if name in EXTRAS[kind] or any(each.is_named(name) for each in scan(kind))]
    if found or ":" not in name:
        return found
    broken: list[PluginError] = []
    for kind in Kind:
        try:
            load(kind, name)
            found.append(kind)
        except PluginNotFound:  # no module
            return []
        except PluginError as error:
            broken.append(error)
    if not found and (causes := [error for error in broken if error.__cause__ is not None]):
        raise causes[0]
    return found


def _dotted(api: tuple[int, int]) -> str:
    return ".".join(map(str, api))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", nargs="?", help="only these, such as backends or commands")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs: an array for each kind")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    values = [kind.value for kind in Kind]
    if args.kind not in (None, *values):
        near = did_you_mean(args.kind, values)
        raise UserError(f"there are no plugins of kind {args.kind!r}; choose from {', '.join(values)}{near}")
    kinds = [kind for kind in Kind if args.kind in (None, kind.value)]
    with redirect_stdout(sys.stderr):  # a plugin may print on import
        found = {kind: installed(kind) for kind in kinds}
    missing = {
        kind: {
            name: install_hint(extra)
            for name, extra in EXTRAS[kind].items()
            if name not in {each.name for each in plugins}
        }
        for kind, plugins in found.items()
    }
    if args.json:
        rows = {kind.value: _rows(found[kind], missing[kind]) for kind in kinds}
        print(json.dumps(rows if args.kind is None else rows[args.kind], indent=2))
    elif args.kind is None:
        print("\n\n".join(f"{kind.value}\n{_text(found[kind], missing[kind])}" for kind in kinds))
    else:
        print(_text(found[kinds[0]], missing[kinds[0]]))
    return 0


def _rows(found: Sequence[Installed], missing: Mapping[str, str]) -> list[dict[str, Any]]:
    rows = [asdict(each) for each in found]
    return rows + [{"name": name, "status": "not installed", "reason": hint} for name, hint in missing.items()]


def _text(found: Sequence[Installed], missing: Mapping[str, str]) -> str:
    """A table with columns as wide as their widest cell, except the last, which may hold sentences."""
    if not found and not missing:
        return "none"
    rows = [("NAME", "PACKAGE", "VERSION", "API", "STATUS")]
    for each in found:
        api = ".".join(map(str, each.api)) if each.api else "-"
        status = f"{each.status}: {each.reason or each.summary}"
        if each.status in ("broken", "conflict"):
            status += f" (corerl doctor {each.name})"
        rows.append((each.name, each.distribution, each.version, api, status))
    rows += [(name, "-", "-", "-", f"not installed: {hint}") for name, hint in missing.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(printable("  ".join([*map(str.ljust, row, widths), row[-1]])) for row in rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        help="of a backend, an engine, an extension, ..., or a run's TOML file: all of its settings",
    )
    parser.add_argument("--kind", metavar="KIND", help="needed if several plugins have this name: backend, engine, ...")
    parser.set_defaults(run=run_options)


def run_options(args: argparse.Namespace) -> int:
    if args.name.endswith(".toml"):
        print("\n".join(settings_with_help(filled_in(load_config(args.name)))))
        return 0
    nouns = {kind.noun: kind for kind in Kind}
    if args.kind and args.kind not in nouns:
        raise UserError(f"unknown kind {args.kind!r}; known: {', '.join(nouns)}{did_you_mean(args.kind, nouns)}")
    kinds = [nouns[args.kind]] if args.kind else kinds_of(args.name)
    if not kinds and args.name in class_fields(Config):
        raise UserError(
            f"{args.name!r} is no plugin but a table of core; corerl options FILE.toml shows core's settings"
        )
    if not kinds:
        known = [name for kind in Kind for name in known_names(kind)]
        near = did_you_mean(args.name, known) or "; corerl plugins lists all"
        raise PluginNotFound(f"unknown plugin {args.name!r}{near}")
    if len(kinds) > 1:
        raise PluginConflict(
            f"{args.name!r} is the name of several plugins; write "
            + " or ".join(f"--kind {kind.noun}" for kind in kinds)
        )
    print(table_of(kinds[0], load(kinds[0], args.name)), end="")
    return 0


def table_of(kind: Kind, loaded: Loaded) -> str:
    """One plugin's table for a config file, all settings at their defaults: adding it changes nothing in the run."""
    source = f" ({loaded.distribution} {loaded.version})" if loaded.distribution else ""
    lines = comment(f"{kind.noun} {loaded.name}{source}: {loaded.spec.summary}")
    if kind in SELECTED_BY:
        lines.append(f"# selected by {SELECTED_BY[kind]} = {toml_value(loaded.name)}")
        path = f"{kind.value}.{toml_key(loaded.name)}"
    elif kind is Kind.EXTENSIONS:
        lines.append("# extensions listed in a config replace the default ones; the first is the outermost")
        lines += ["[[extensions]]", f"name = {toml_value(loaded.name)}"]
        path = "extensions.options"
    else:
        path = toml_key(loaded.name)  # of a command's own config
    if not class_fields(loaded.spec.config):
        lines.append("# there are no settings")
        if kind not in SELECTED_BY and kind is not Kind.EXTENSIONS:
            return "\n".join(lines) + "\n"
    try:
        defaults = loaded.spec.config()
    except Exception as error:
        raise PluginBroken(
            f"{kind.noun} {loaded}: {loaded.spec.config.__name__}() raised {one_line(error)}; every setting needs a "
            "valid default"
        ) from error
    return "\n".join([*lines, f"[{path}]", *settings_with_help(defaults, path)]) + "\n"
