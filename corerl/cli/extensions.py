"""`corerl extensions [--json]`: the observers and wrappers that are installed, and why some will not run."""

from __future__ import annotations

import argparse
from typing import Any

from corerl.cli.plugins import add_listing, list_plugins


def add_parser(subparsers: Any) -> None:
    add_listing(subparsers, "extensions", "extensions")


def run(args: argparse.Namespace) -> int:
    return list_plugins("extensions", args)
