"""`corerl config check|show`: check whether a configuration can run, or print it in full, without starting anything."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("config", help="check a configuration, or show it with everything filled in")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="report every problem; exit status 2 if there are any")
    show = actions.add_parser("show", help="print the resolved configuration as TOML, itself a valid input")
    show.add_argument("--help-texts", action="store_true", help="with each setting's help as a comment above it")
    for action in (check, show):
        action.add_argument("file", metavar="FILE", help="a TOML file")
        action.add_argument(
            "overrides", metavar="KEY=VALUE", nargs="*", default=[], help="such as rollout.temperature=0.8"
        )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from corerl.cli.trial import beside
    from corerl.config.load import load_config
    from corerl.plan.names import wrong_apart
    from corerl.plan.user_code import code_of

    config = load_config(args.file, args.overrides, more=partial(wrong_apart, trial=beside))
    code = code_of(config)
    tried = beside(code.modules, code.plugins)
    if args.action == "show":
        from corerl.config.describe import annotate
        from corerl.config.load import dump_toml
        from corerl.plan.resolve import resolve_tables, settle_algorithm, settle_extensions

        tried()
        resolved = resolve_tables(settle_algorithm(settle_extensions(config)))
        toml = dump_toml(resolved)
        print(annotate(toml, resolved) if args.help_texts else toml, end="")
        return 0

    from corerl.imports import uncollected
    from corerl.messages import note
    from corerl.plan.resolve import ignored_tables

    with uncollected():
        from corerl.plan.make import make_plan

    tried()
    ignored = ignored_tables(config)
    for line in ignored:  # first: they may explain what is wrong
        note(line)
    plan = make_plan(config, starting=False)
    for line in plan.notices:
        if line not in ignored:
            note(line)
    print(f"{args.file}: ok")
    return 0
