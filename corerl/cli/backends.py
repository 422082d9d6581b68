"""`corerl backends [--json]`: the training backends that are installed, and why some will not run."""

from __future__ import annotations

import argparse
from typing import Any

from corerl.cli.plugins import add_listing, list_plugins


def add_parser(subparsers: Any) -> None:
    add_listing(subparsers, "backends", "training backends")


def run(args: argparse.Namespace) -> int:
    return list_plugins("backends", args)
