"""`corerl train FILE [KEY=VALUE ...]`: run the training loop."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("train", help="train as a configuration specifies")
    parser.add_argument("file", metavar="FILE", help="a TOML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="such as rollout.temperature=0.8")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from corerl.cli.trial import beside
    from corerl.config.load import load_config
    from corerl.imports import uncollected
    from corerl.plan.names import wrong_apart
    from corerl.plan.user_code import code_of

    # First: shows its errors without importing torch.
    config = load_config(args.file, args.overrides, more=partial(wrong_apart, trial=beside))
    code = code_of(config)
    tried = beside(code.modules, code.plugins)
    with uncollected():
        from corerl.loop import train

    tried()
    train(config)
    return 0
