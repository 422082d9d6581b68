"""`corerl best RUN [--metric NAME]`: the step at which a run's metric was largest."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from corerl.errors import UserError
from corerl.plugin import CommandSpec

SPEC = CommandSpec(
    implementation="corerl_best:add_arguments", api=(2, 0), summary="the step at which a metric was largest"
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run's directory, with metrics.jsonl")
    parser.add_argument("--metric", metavar="NAME", default="rollout/reward", help="default: rollout/reward")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    lines = map(json.loads, (args.run_dir / "metrics.jsonl").read_text().splitlines())
    values = {line["step"]: line[args.metric] for line in lines if line.get(args.metric) is not None}
    if not values:
        raise UserError(f"{args.run_dir}: metrics.jsonl has no {args.metric}; choose another --metric")
    best = max(values, key=values.__getitem__)
    print(f"step {best}: {args.metric} {values[best]:.4g}")
    return 0
