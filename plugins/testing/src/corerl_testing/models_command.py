"""`corerl models [TYPE ...] [--check] [--json]`: which model types of transformers can be trained, and how."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from corerl_testing.matrix import Row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Build each type of causal language model that the installed transformers has, and the text half of each that "
        "reads pictures, very small but with every kind of its layers, and tell whether it is trained packed or whole "
        "(train.layout), or why not."
    )
    parser.add_argument("types", metavar="TYPE", nargs="*", help="model types, such as qwen3; none: all")
    parser.add_argument(
        "--check", action="store_true", help="compare log-probs and gradients with transformers' own, in float32"
    )
    parser.add_argument("--json", action="store_true", help="as a JSON array, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """1 if what an accepted model computes is not what transformers does."""
    from corerl.errors import ConfigError
    from corerl.messages import did_you_mean
    from corerl_testing.matrix import Status, model_types, rows

    known = model_types()
    for each in args.types:
        if each not in known:
            raise ConfigError(f"{each!r} is no language model of transformers{did_you_mean(each, known)}")
    found = []
    for row in rows(args.types or known, check=args.check):
        found.append(row)
        if not args.json:
            print(_line(row), flush=True)
    print(_json(found) if args.json else _summary(found))
    return int(any(row.status is Status.WRONG for row in found))


def _line(row: Row) -> str:
    numbers = "" if row.logprobs is None else f"  log-probs {row.logprobs:.0e}, gradients {row.gradients:.0e}"
    half = "  its text half" if row.pictures else ""
    return f"{row.model_type:28}  {row.status:8}{half}{numbers}{f'  {row.reason}' if row.reason else ''}"


def _summary(found: Sequence[Row]) -> str:
    from corerl_testing.matrix import Status

    counts = {status: sum(row.status is status for row in found) for status in Status}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)


def _json(found: Sequence[Row]) -> str:
    import json

    from attrs import asdict

    return json.dumps([asdict(row) for row in found], indent=2)
