"""`corerl backends [--json]`: the training backends that are installed, and why some will not run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corerl.plugin.registry import Installed


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("backends", help="list the training backends that are installed, and their state")
    parser.add_argument("--json", action="store_true", help="as a JSON array, for programs")


def run(args: argparse.Namespace) -> int:
    from corerl.plugin.registry import INSTALL_HINTS, Kind, installed

    found = installed(Kind.BACKENDS)
    names = {each.name for each in found}
    missing = {name: hint for name, hint in INSTALL_HINTS[Kind.BACKENDS].items() if name not in names}
    print(_json(found, missing) if args.json else _text(found, missing))
    return 0


def _json(found: list[Installed], missing: dict[str, str]) -> str:
    import json

    from attrs import asdict

    rows = [asdict(each) for each in found]
    rows += [{"name": name, "status": "not installed", "reason": hint} for name, hint in missing.items()]
    return json.dumps(rows, indent=2)


def _text(found: list[Installed], missing: dict[str, str]) -> str:
    """Columns as wide as their widest cell; the last one, which may be a sentence, is left as it is."""
    rows = [("NAME", "PACKAGE", "VERSION", "API", "STATUS")]
    for each in found:
        api = ".".join(map(str, each.api)) if each.api else "-"
        status = f"{each.status}: {each.reason}" if each.reason else f"{each.status}: {each.summary}"
        rows.append((each.name, each.distribution, each.version, api, status))
    rows += [(name, "-", "-", "-", f"not installed: {hint}") for name, hint in missing.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows)
