"""`corerl plugins [KIND] [--json]`: what is installed of every kind, and why some cannot run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corerl.plugin.registry import Installed, Kind


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("plugins", help="list the installed plugins of every kind and their state")
    parser.add_argument("kind", metavar="KIND", nargs="?", help="only these, such as backends or commands")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs: an array for each kind")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import json

    from corerl.errors import UserError
    from corerl.messages import did_you_mean
    from corerl.plugin.registry import INSTALL_HINTS, Kind

    values = [kind.value for kind in Kind]
    if args.kind not in (None, *values):
        near = did_you_mean(args.kind, values)
        raise UserError(f"there are no plugins of kind {args.kind!r}; choose from {', '.join(values)}{near}")
    kinds = [kind for kind in Kind if args.kind in (None, kind.value)]
    found = find(kinds)
    missing = {kind: dict(INSTALL_HINTS[kind]) for kind in kinds}
    for kind in kinds:
        for each in found[kind]:
            missing[kind].pop(each.name, None)
    if args.json:
        rows = {kind.value: _rows(found[kind], missing[kind]) for kind in kinds}
        print(json.dumps(rows if args.kind is None else rows[args.kind], indent=2))
    elif args.kind is None:
        print("\n\n".join(f"{kind.value}\n{_text(found[kind], missing[kind])}" for kind in kinds))
    else:
        print(_text(found[kinds[0]], missing[kinds[0]]))
    return 0


def find(kinds: Sequence[Kind]) -> Mapping[Kind, list[Installed]]:
    """What is installed of these kinds. A plugin whose import ends its process is broken, as if it had failed."""
    from corerl.cli.trial import fatal_plugins, in_fork
    from corerl.plugin.registry import installed, scan

    with redirect_stdout(sys.stderr):  # a plugin may print on import
        found = in_fork(lambda: {kind: installed(kind) for kind in kinds})
        if found is None:
            found = {}
            for kind in kinds:
                fatal = fatal_plugins(kind, [f"{entry.distribution}:{entry.name}" for entry in scan(kind)])
                found[kind] = installed(kind, fatal)
    return found


def _rows(found: Sequence[Installed], missing: Mapping[str, str]) -> list[dict[str, Any]]:
    from attrs import asdict

    rows = [asdict(each) for each in found]
    return rows + [{"name": name, "status": "not installed", "reason": hint} for name, hint in missing.items()]


def _text(found: Sequence[Installed], missing: Mapping[str, str]) -> str:
    """A table with columns as wide as their widest cell, except the last, which may hold sentences."""
    if not found and not missing:
        return "none"
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
