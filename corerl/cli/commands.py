"""The commands of `corerl`, core's own and those of plugins: `--help` lists their specs; only the chosen one's code is
imported."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from corerl.errors import PluginBroken
from corerl.messages import one_line, printable
from corerl.plugin.registry import CORE_COMMANDS, Kind, Loaded, Status, installed, load, load_implementation
from corerl.plugin.spec import API, CommandSpec

CORE = {
    name: CommandSpec(implementation=implementation, api=API, summary=summary)
    for name, implementation, summary in (
        ("train", "corerl.cli.config:add_train_arguments", "train as a configuration specifies"),
        ("eval", "corerl.cli.eval:add_arguments", "score weights on the held-out prompts"),
        (
            "export",
            "corerl.cli.export:add_arguments",
            "write a checkpoint's weights as a Hugging Face model directory",
        ),
        (
            "config",
            "corerl.cli.config:add_arguments",
            "check a configuration, or show it with everything filled in",
        ),
        ("plugins", "corerl.cli.plugins:add_arguments", "list the installed plugins of every kind and their state"),
        ("options", "corerl.cli.plugins:add_options", "print a plugin's settings as TOML, each with its default"),
    )
}
assert tuple(CORE) == CORE_COMMANDS


def add_parsers(subparsers: Any, words: Sequence[str]) -> None:
    """Add the parser of the command that `words` choose, or an entry for each if they ask for `corerl --help`. Raises
    PluginError if the command is unknown or cannot be used."""
    name = next((word for word in words if not word.startswith("-")), None)
    leading = words if name is None else words[: words.index(name)]
    if {"-h", "--help"} & set(leading):
        for each, summary in _summaries().items():
            subparsers.add_parser(each, help=printable(summary).replace("%", "%%"))
    elif name is not None:
        _add_chosen(subparsers, name)


def _summaries() -> dict[str, str]:
    shown = {name: spec.summary for name, spec in CORE.items()}
    for each in installed(Kind.COMMANDS):
        name = f"{each.distribution}:{each.name}" if each.status is Status.CONFLICT else each.name
        usable = each.status in (Status.OK, Status.CONFLICT)
        shown[name] = each.summary if usable else f"{each.status}: {each.reason}"
    return shown


def _add_chosen(subparsers: Any, name: str) -> None:
    if (spec := CORE.get(name)) is not None:
        loaded = Loaded(name=name, distribution="corerl", version="", value=spec.implementation, spec=spec)
    else:
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
