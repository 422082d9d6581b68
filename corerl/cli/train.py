"""`corerl train FILE [KEY=VALUE ...]`: run the training loop."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a TOML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="such as rollout.temperature=0.8")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from corerl.config.load import load_config
    from corerl.imports import uncollected

    config = load_config(args.file, args.overrides)  # before torch is imported, so that its errors come at once
    with uncollected():
        from corerl.loop import train
    train(config)
    return 0
