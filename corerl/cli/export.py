"""`corerl export CHECKPOINT DIRECTORY`: write a role's weights in a checkpoint as a Hugging Face model directory."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("export", help="write a checkpoint's weights as a Hugging Face model directory")
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint's directory, or a run's (for its newest checkpoint)"
    )
    parser.add_argument("directory", metavar="DIRECTORY", help="directory to write to; must not exist")
    parser.add_argument("--role", default="actor", help="whose weights: actor (the default) or critic")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="",
        help="of the weights; by default bfloat16 where the model came in it, else the precision of the training",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from corerl.cli.newest import with_checkpoint
    from corerl.driver.export import export

    directory = Path(args.directory)
    with_checkpoint(
        Path(args.checkpoint), lambda checkpoint: export(checkpoint, directory, role=args.role, dtype=args.dtype)
    )
    print(f"wrote {directory}")
    return 0
