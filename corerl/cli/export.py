"""`corerl export CHECKPOINT DIRECTORY`: write a role's weights in a checkpoint as a Hugging Face model directory."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint's directory, or a run's (for its newest checkpoint)"
    )
    parser.add_argument("directory", metavar="DIRECTORY", help="directory to write to; must not exist")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="of what a TrainGroup has saved, or `corerl serve`: the config that it was started with",
    )
    parser.add_argument("--role", default="actor", help="whose weights: actor (the default) or critic")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="",
        help="of the weights; by default bfloat16 where the model came in it, else the precision of the training",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--adapter",
        dest="merge",
        action="store_false",
        default=None,
        help="of a role that trains adapters: a directory of PEFT with these alone (the default)",
    )
    form.add_argument(
        "--merge",
        dest="merge",
        action="store_true",
        default=None,
        help="of such a role: the whole model, with the adapters merged into its weights",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from corerl.checkpoint.commit import require_directory
    from corerl.cli.eval import checkpoint_in
    from corerl.config.load import load_config
    from corerl.imports import uncollected

    # Before torch is imported, so that these errors come at once.
    config = load_config(args.config) if args.config else None
    directory, checkpoint = Path(args.directory), checkpoint_in(Path(args.checkpoint))
    require_directory(checkpoint)
    with uncollected():
        from corerl.driver.export import export

    export(checkpoint, directory, role=args.role, config=config, dtype=args.dtype, merge=args.merge)
    print(f"wrote {directory}")
    return 0
