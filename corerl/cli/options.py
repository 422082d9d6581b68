"""`corerl options NAME [--kind KIND]`: print every setting of a plugin as TOML with its default, ready to paste."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("options", help="print a plugin's settings as TOML, each with its default")
    parser.add_argument("name", metavar="NAME", help="of a backend, an engine, an extension, ...")
    parser.add_argument("--kind", metavar="KIND", help="needed if several plugins have this name: backend, engine, ...")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from corerl.cli.trial import require_plugins
    from corerl.errors import PluginConflict, UserError
    from corerl.messages import did_you_mean
    from corerl.plugin.registry import Kind, kinds_of, load, unknown
    from corerl.plugin.toml_help import table_of

    nouns = {kind.noun: kind for kind in Kind}
    if args.kind and args.kind not in nouns:
        raise UserError(f"unknown kind {args.kind!r}; known: {', '.join(nouns)}{did_you_mean(args.kind, nouns)}")
    require_plugins([(kind, args.name) for kind in Kind])
    kinds = [nouns[args.kind]] if args.kind else kinds_of(args.name)
    if not kinds:
        raise unknown(args.name)
    if len(kinds) > 1:
        found = [kind.noun for kind in kinds]
        raise PluginConflict(
            f"{args.name!r} is the name of {' and '.join(f'an {n}' if n[0] in 'ae' else f'a {n}' for n in found)}; "
            f"write {' or '.join(f'--kind {noun}' for noun in found)}"
        )
    print(table_of(kinds[0], load(kinds[0], args.name)), end="")
    return 0
