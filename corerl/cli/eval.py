"""`corerl eval WHAT [KEY=VALUE ...]`: score a checkpoint, or the model that a configuration begins with."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("eval", help="score weights on the held-out prompts")
    parser.add_argument(
        "what", metavar="WHAT", help="a directory of a checkpoint or of a run (its newest one), or a TOML file"
    )
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="such as data.source=other.jsonl")
    parser.add_argument("--json", action="store_true", help="print the scores alone, as JSON")


def run(args: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    from attrs import evolve

    from corerl.checkpoint.commit import latest, read_state
    from corerl.config.load import config_of, load_config
    from corerl.train import evaluate

    what = Path(args.what)
    given = [*args.overrides, "run.mode=eval", *(["extensions=[]"] if args.json else [])]
    if what.is_dir():
        checkpoint = (latest(what) or what).absolute()
        config = config_of(
            read_state(checkpoint)["config"], [f"checkpoint.resume={checkpoint}", "rollout.saved=", *given]
        )
        run_dir = checkpoint.parents[1]
    else:
        config = load_config(what, given)
        run_dir = Path(config.run.dir)
        if config.checkpoint.resume == "auto":  # of the run, not of the directory that the scores go to
            newest = str(latest(run_dir) or "never")
            config = evolve(config, checkpoint=evolve(config.checkpoint, resume=newest))
    # A directory of its own: what the run itself has written stays as it is.
    summary = evaluate(evolve(config, run=evolve(config.run, dir=str(run_dir / "eval"))))
    if args.json:
        print(json.dumps(summary.evaluation))
    return 0
