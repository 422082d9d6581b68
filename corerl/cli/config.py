"""`corerl config check|show`: check whether a configuration can run, or print it in full, without starting anything."""

from __future__ import annotations

import argparse
import sys
from typing import Any

SECONDS = 10.0  # between two notes of how many prompts are checked


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
    from corerl.cli.trial import try_imports
    from corerl.config.load import load_config

    config = load_config(args.file, args.overrides)
    tried = try_imports(config)
    if args.action == "show":
        from corerl.config.describe import annotate
        from corerl.config.load import dump_toml
        from corerl.plugin.options import resolve_tables, settle_algorithm

        tried()
        resolved = resolve_tables(settle_algorithm(config))
        toml = dump_toml(resolved)
        print(annotate(toml, resolved) if args.help_texts else toml, end="")
        return 0

    from corerl.driver.algorithm import told_sampling
    from corerl.driver.prepare import prepare, told_answers, told_layouts, told_memory
    from corerl.messages import LONGEST_LINE, shorten
    from corerl.plugin.options import notes

    tried()
    for note in notes(config):
        print(f"corerl: note: {shorten(note, LONGEST_LINE)}", file=sys.stderr)
    prepared = prepare(config, starting=False)
    check = prepared.check
    while check is not None and not check.look(SECONDS):
        print(f"corerl: note: {check.done:,} of {check.of:,} prompts are checked", file=sys.stderr)
    for note in (
        *told_answers(prepared),
        *prepared.notices,
        *told_sampling(prepared.config),
        *told_layouts(prepared),
        *prepared.settled,
        *told_memory(prepared),
        *(check.finish() if check is not None else ()),
    ):
        print(f"corerl: note: {shorten(note, LONGEST_LINE)}", file=sys.stderr)
    print(f"{args.file}: ok")
    return 0
