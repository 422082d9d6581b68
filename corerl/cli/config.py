"""What takes a configuration: `corerl train FILE [KEY=VALUE ...]`, and `corerl config check|show`, which read it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corerl.plugin.registry import Loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="report every problem; exit status 2 if there are any")
    check.set_defaults(run=run_check)
    show = actions.add_parser("show", help="print the resolved configuration as TOML, itself a valid input")
    show.set_defaults(run=run_show)
    for action in (check, show):
        _add_file(action)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    _add_file(parser)
    parser.set_defaults(run=run_train)


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a TOML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="such as rollout.temperature=0.8")


def run_train(args: argparse.Namespace) -> int:
    from corerl.cluster.forks import fork_server
    from corerl.config.load import config_of, read_toml
    from corerl.errors import ConfigError
    from corerl.imports import uncollected
    from corerl.messages import loading
    from corerl.plan.environment import preload_of

    data = read_toml(args.file)
    if (command := command_of(data)) is not None:
        raise ConfigError(
            f"{args.file}: the table [{command.name}] makes it a config of another command; run: corerl {command.name} "
            f"{shlex.quote(args.file)}"
        )
    config = config_of(data, args.overrides)  # before torch is imported, so that its errors come at once
    loading()
    preload = preload_of(config)
    with fork_server(preload.modules, preload.environment) as forks:
        with uncollected():
            from corerl.loop import train
        train(config, forks=forks)
    return 0


def command_of(data: Mapping[str, Any]) -> Loaded | None:
    """The plugin's command, if any, whose table a file has: it is for this command, and for no run."""
    from corerl.plugin.registry import Kind, installed_names, load

    named = (load(Kind.COMMANDS, name) for name in sorted(data.keys() & set(installed_names(Kind.COMMANDS))))
    return next((command for command in named if command.spec.check), None)


def run_show(args: argparse.Namespace) -> int:
    from corerl.config.load import dump_toml, load_config
    from corerl.plan.resolve import filled_in

    print(dump_toml(filled_in(load_config(args.file, args.overrides))), end="")
    return 0


def run_check(args: argparse.Namespace) -> int:
    from corerl.config.load import config_of, read_toml
    from corerl.imports import uncollected
    from corerl.messages import note
    from corerl.plan.resolve import ignored_tables
    from corerl.plugin.registry import Kind, load_implementation

    data = read_toml(args.file)  # once: it may be a pipe
    if (command := command_of(data)) is not None:
        for line in load_implementation(Kind.COMMANDS, command, command.spec.check)(args.file, args.overrides):
            note(line)
        print(f"{args.file}: ok for corerl {command.name}")
        return 0
    config = config_of(data, args.overrides)
    ignored = ignored_tables(config)
    for line in ignored:  # first: they may explain what is wrong
        note(line)
    with uncollected():
        from corerl.plan.make import make_plan
    plan = make_plan(config, starting=False)
    for line in plan.notices:
        if line not in ignored:
            note(line)
    print(f"{args.file}: ok")
    return 0
