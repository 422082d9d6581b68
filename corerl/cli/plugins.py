"""`corerl backends`, `engines`, `extensions`, `algorithms` `[--json]`: what is installed, and why some cannot run."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corerl.plugin.registry import Installed


KINDS = {
    "backends": "training backends",
    "engines": "rollout engines",
    "extensions": "observers and wrappers",
    "algorithms": "algorithms",
}


def add_parser(subparsers: Any) -> None:
    for kind, what in KINDS.items():
        parser = subparsers.add_parser(kind, help=f"list the installed {what} and their state")
        parser.add_argument("--json", action="store_true", help="as a JSON array, for programs")
        parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from corerl.cli.trial import fatal_plugins, in_fork
    from corerl.plugin.registry import INSTALL_HINTS, Kind, installed, scan

    kind = Kind(args.command)
    with redirect_stdout(sys.stderr):  # a plugin may print on import
        found = in_fork(lambda: installed(kind))
        if found is None:
            fatal = fatal_plugins(kind, [f"{entry.distribution}:{entry.name}" for entry in scan(kind)])
            found = installed(kind, fatal)
    names = {each.name for each in found}
    missing = {name: hint for name, hint in INSTALL_HINTS[kind].items() if name not in names}
    print(_json(found, missing) if args.json else _text(found, missing))
    return 0


def _json(found: list[Installed], missing: dict[str, str]) -> str:
    import json

    from attrs import asdict

    rows = [asdict(each) for each in found]
    rows += [{"name": name, "status": "not installed", "reason": hint} for name, hint in missing.items()]
    return json.dumps(rows, indent=2)


def _text(found: list[Installed], missing: dict[str, str]) -> str:
    """A table with columns as wide as their widest cell, except the last, which may hold sentences."""
    from corerl.messages import printable

    rows = [("NAME", "PACKAGE", "VERSION", "API", "STATUS")]
    for each in found:
        api = ".".join(map(str, each.api)) if each.api else "-"
        status = f"{each.status}: {each.reason or each.summary}"
        if each.status in ("broken", "conflict"):
            status += f" (corerl doctor {each.name})"
        rows.append((each.name, each.distribution, each.version, api, status))
    rows += [(name, "-", "-", "-", f"not installed: {hint}") for name, hint in missing.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [printable("  ".join([*map(str.ljust, row, widths), row[-1]])) for row in rows]
    shadowed = {each.distribution: each for each in found if each.shadowed}
    for name, each in shadowed.items():
        lines.append(f"{name} is found twice; not used: {', '.join(each.shadowed)} (corerl doctor {each.name})")
    return "\n".join(lines)
