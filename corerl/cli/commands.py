"""Commands of plugins: `corerl --help` lists them by their specs; the code of one is imported once it is chosen."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from corerl.plugin.registry import CORE_COMMANDS, Kind, Status, load, load_implementation, locate, scan


def add_parsers(subparsers: Any, words: Sequence[str]) -> None:
    """Add the parser of the plugin's command that `words` choose, or an entry for each if they ask for `corerl --help`.
    Raises PluginError if the command is unknown or cannot be used."""
    name = next((word for word in words if not word.startswith("-")), None)
    leading = words if name is None else words[: words.index(name)]
    if {"-h", "--help"} & set(leading):
        _add_all(subparsers)
    elif name is not None and name not in subparsers.choices:
        _add_chosen(subparsers, name)


def other_providers(name: str) -> list[str]:
    """A note for each plugin with a command of this name, which is core's own."""
    return [
        f"{name!r} is core's own command; write '{entry.distribution}:{name}' for that of {entry.distribution} "
        f"{entry.version}"
        for entry in (scan(Kind.COMMANDS) if name in CORE_COMMANDS else ())
        if entry.name == name
    ]


def _add_all(subparsers: Any) -> None:
    from corerl.cli.plugins import find
    from corerl.messages import printable

    shown = {}
    for each in find([Kind.COMMANDS])[Kind.COMMANDS]:
        name = f"{each.distribution}:{each.name}" if each.status is Status.CONFLICT else each.name
        usable = each.status in (Status.OK, Status.CONFLICT)
        shown[name] = each.summary if usable else f"{each.status}: {each.reason}"
    for name, text in shown.items():
        subparsers.add_parser(name, help=printable(text).replace("%", "%%"))


def _add_chosen(subparsers: Any, name: str) -> None:
    from corerl.cli.trial import in_fork, require_plugins
    from corerl.errors import PluginBroken
    from corerl.messages import one_line

    locate(Kind.COMMANDS, name)
    if in_fork(lambda: bool(load(Kind.COMMANDS, name))) is None:
        require_plugins([(Kind.COMMANDS, name)])  # says so if the import has ended the fork
    loaded = load(Kind.COMMANDS, name)
    add_arguments = load_implementation(Kind.COMMANDS, loaded)
    code = f"command {loaded}: {loaded.spec.implementation}"

    def run(args: argparse.Namespace) -> int:
        raise PluginBroken(f"{code} has not set `run`; it must call parser.set_defaults(run=FUNCTION)")

    parser = subparsers.add_parser(name)
    parser.set_defaults(run=run)
    try:
        add_arguments(parser)
    except (Exception, SystemExit) as error:
        raise PluginBroken(f"{code} cannot add its arguments: {one_line(error)}") from error
