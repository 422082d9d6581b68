"""`corerl eval WHAT [KEY=VALUE ...]`: score a checkpoint, or the model that a configuration starts from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.config.schema import Config

# Settings of sampling for training, and what to set for evaluation instead.
SAMPLING = {f"rollout.{name}": f"set eval.{name}" for name in ("samples", "temperature", "top_p", "top_k")}
SAMPLING["rollout.prompts"] = "all held-out prompts are scored; data.held_out says how many there are"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="a checkpoint's directory, a run's directory (for its newest checkpoint), or a TOML file",
    )
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],
        help="such as eval.samples=8; results go to run.dir/eval, by default of WHAT's own run",
    )
    parser.add_argument("--json", action="store_true", help="print only the scores, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import json
    import os

    from attrs import evolve

    from corerl.config.load import load_config
    from corerl.errors import ConfigError
    from corerl.imports import uncollected

    for word in args.overrides:
        if (setting := word.partition("=")[0].strip()) in SAMPLING:
            raise ConfigError(f"{setting}: has no effect on evaluation; {SAMPLING[setting]}")
    what = Path(args.what)
    given = [*args.overrides, "run.mode=eval", *(["extensions=[]"] if args.json else [])]
    # A path that does not exist is a config file only if it ends in .toml; otherwise a misspelt run, or a checkpoint
    # that retention has removed.
    directory = os.path.isdir(what) or (what.suffix != ".toml" and not os.path.exists(what))
    # Before torch is imported, so that errors come at once.
    config = None if directory else load_config(what, given)
    newest = config is None or config.checkpoint.resume == "auto"  # a run's, if no other checkpoint is named
    checkpoint = checkpoint_in(Path(config.run.dir) if config else what) if newest else what
    own = config or config_for(checkpoint.absolute(), given)
    if config is not None and newest:  # not that of the directory for the scores
        resume = "never" if checkpoint == Path(own.run.dir) else str(checkpoint)  # without one, the initial weights
        own = evolve(own, checkpoint=evolve(own.checkpoint, resume=resume))
    with uncollected():
        from corerl.loop import train
    scores = Path(own.run.dir) / "eval"  # so that the run's own files stay as they are
    summary = train(evolve(own, run=evolve(own.run, dir=str(scores))))
    if args.json:
        print(json.dumps(summary.evaluation))
    return 0


def config_for(checkpoint: Path, given: Sequence[str]) -> Config:
    """The config of the run that wrote a checkpoint, to score it, with the overrides `given`."""
    import os

    from attrs import evolve

    from corerl.checkpoint.commit import read_state
    from corerl.checkpoint.format import checkpoints_dir
    from corerl.config.load import config_of
    from corerl.messages import note

    run_dir = checkpoint.parent
    if run_dir.name == checkpoints_dir("").name:  # else the checkpoint was copied elsewhere
        run_dir = run_dir.parent
    own = [f"run.dir={run_dir}", f"checkpoint.resume={checkpoint}", "rollout.saved="]
    config = config_of(read_state(checkpoint)["config"], [*own, *given])
    missing = [name for name in config.cluster.secrets if name not in os.environ]
    if missing:  # they were needed to train; scores may not need them
        note(f"cluster.secrets: not set here: {', '.join(map(repr, missing))}")
        there = tuple(name for name in config.cluster.secrets if name not in missing)
        config = evolve(config, cluster=evolve(config.cluster, secrets=there))
    return config


def checkpoint_in(what: Path) -> Path:
    """A run's newest checkpoint; if that is damaged, the one before, with a line on stderr for each that is skipped. A
    path that is no run is that itself. Raises CheckpointError if all checkpoints are damaged."""
    from corerl.checkpoint.commit import newest_intact
    from corerl.errors import CheckpointError
    from corerl.messages import LONGEST_LINE, shorten

    newest, lost = newest_intact(what)
    for path, fault in lost.items():
        if newest is None:
            raise CheckpointError(f"{what} is a run directory without an intact checkpoint: {fault}")
        line = f"corerl: skipping {path.name}, using {newest.name}: {shorten(fault, LONGEST_LINE)}"
        print(line, file=sys.stderr)
    return newest or what
