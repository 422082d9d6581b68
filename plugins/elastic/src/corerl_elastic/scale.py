"""`corerl scale RUN KEY=VALUE ...`: change the sizes of a running run's groups."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="RUN", help="the run's directory")
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],
        help="such as roles.actor.ranks=4, backends.NAME.OPTION=2 or rollout.replicas=2",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import functools
    import os
    import sys
    from pathlib import Path

    from corerl.config import CONFIG_FILE, load_config
    from corerl.driver import is_occupied
    from corerl.errors import ConfigError
    from corerl.messages import did_you_mean_path
    from corerl_elastic.scaling import ask
    from corerl_elastic.sizes import with_other_sizes

    run_dir = Path(args.what)
    if not args.overrides:
        raise ConfigError("no sizes are given; name some, such as roles.actor.ranks=4 or rollout.replicas=2")
    if not os.path.isdir(run_dir):
        raise ConfigError(f"no run at {run_dir}, which does not exist{did_you_mean_path(run_dir)}")
    if not os.path.exists(run_dir / CONFIG_FILE):
        raise ConfigError(f"{run_dir} is not a run's directory: it has no {CONFIG_FILE}")
    config = with_other_sizes(load_config(run_dir / CONFIG_FILE), args.overrides)  # the rest is checked by the run
    if not config.run.trains:
        raise ConfigError(f"run.mode: {config.run.mode!r}, but only a run that trains changes its sizes; start another")
    runs = functools.partial(is_occupied, run_dir)
    if not runs():
        raise ConfigError(f"{run_dir}: no run is running there; set its sizes when you start it")
    answer = ask(run_dir, args.overrides, runs=runs, notify=lambda line: print(line, file=sys.stderr))
    for line in answer.changed:
        print(line)
    if answer.error:
        raise ConfigError(answer.error)
    if not answer.changed:
        print("nothing to change: these are the sizes already")
    return 0
