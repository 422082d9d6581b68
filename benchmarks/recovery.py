"""Measure what a killed rank and a resize cost a run, and what in-memory checkpoints cost each step.

python -m benchmarks.recovery --output found/recovery.json            # the quickstart on two CPU cores
python -m benchmarks.recovery kill --set backend.name=deepspeed cluster.device=cuda train.precision=bfloat16

Each part starts `corerl train` with `--set` and watches it from outside; the config is the quickstart with two ranks.

- `memory`: the mean step with `checkpoint.memory`, against the same steps without it.
- `kill`: SIGKILL of the last rank after `--size` steps: seconds until the next step has ended, and until the first step
  that had not been done before; restarted from memory, and from the checkpoint on disk of two steps earlier.
- `resize`: `corerl scale` from two ranks to one and back: seconds until the next step has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attrs import define, evolve, field

from benchmarks.report import Comparison, Number, Report, environment, finish, in_turns, joined, parser
from benchmarks.runs import Ended, Watched
from corerl.cli.main import main as corerl
from corerl.cluster.heartbeat import Heartbeat, Member

PARTS = ("memory", "kill", "resize")
TARGET = 1.25  # of a step with in-memory checkpoints
WITHIN = 600.0  # seconds for a run
VICTIM = "actor rank 1"
PROCESSES = "CORERL_BENCHMARK_PROCESSES"  # names the file that gets the ids of the run's processes
SETTINGS = ("eval.every=0", "roles.actor.ranks=2", "checkpoint.export=false", "train.restarts=3")


def main_with_processes() -> int:
    """`corerl`, whose driver writes down the id of each of its processes."""
    receive, known = Member.receive, dict[str, int]()

    def recorded(member: Member, beat: Heartbeat) -> None:
        receive(member, beat)
        if known.get(member.name) != beat.pid:
            known[member.name] = beat.pid
            Path(os.environ[PROCESSES]).write_text(json.dumps(known))

    Member.receive = recorded  # type: ignore[method-assign, assignment]
    return corerl()


def run(directory: Path, *settings: str) -> Watched:
    return Watched(
        *SETTINGS,
        *settings,
        directory=directory,
        main="benchmarks.recovery:main_with_processes",
        environment={PROCESSES: str(directory / "processes.json")},
    )


@define
class Event:
    """Does something to a run once `after` steps are done, and times the steps that follow."""

    after: int  # steps
    act: str  # kill, or the settings of `corerl scale`
    lines: int = field(default=0, init=False)  # of metrics.jsonl when it happened; 0: not yet
    happened: float = field(default=0.0, init=False)
    next_step: float = field(default=0.0, init=False)  # seconds until the next step's end
    new_step: float = field(default=0.0, init=False)  # seconds until the end of a step that was not done before

    def __call__(self, watched: Watched) -> bool:
        steps = [int(line["step"]) for line in watched.lines() if "time/step" in line]
        if not self.happened:
            if steps and max(steps) >= self.after:
                self.happened = watched.now()
                if self.act == "kill":
                    known = json.loads((watched.directory.parent / "processes.json").read_text())
                    os.kill(known[VICTIM], signal.SIGKILL)
                else:
                    command = [sys.executable, "-m", "corerl", "scale", str(watched.directory), self.act]
                    subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)
            return False
        # A restarted run drops the lines of the steps that it does again.
        if not self.lines:
            restarted = any("time/restart" in line for line in watched.lines())
            if (self.act == "kill" and restarted) or (self.act != "kill" and max(steps) > self.after):
                self.next_step, self.lines = watched.now() - self.happened, len(steps)
        if self.lines and max(steps) > self.after:
            self.new_step = watched.now() - self.happened
        return bool(self.new_step)


def memory(args: argparse.Namespace, directory: Path) -> Report:
    def mean_step(number: int, kept: str) -> float:
        with run(
            directory / f"{kept}-{number}", f"run.steps={2 * args.size}", f"checkpoint.memory={kept}", *args.set
        ) as each:
            return require_finished(each.wait(WITHIN)).mean("time/step", after=2)

    with_memory, without = in_turns(args.rounds, lambda n: mean_step(n, "true"), lambda n: mean_step(n, "false"))
    compared = Comparison(
        what="a step with in-memory checkpoints", against="without", ours=with_memory, other=without, target=TARGET
    )
    return Report(name="recovery memory", size=f"{2 * args.size} steps", comparisons=[compared])


def kill(args: argparse.Namespace, directory: Path) -> Report:
    numbers = []
    for kind, own in (
        ("memory", ["checkpoint.memory=true", "checkpoint.every=0"]),
        ("disk", [f"checkpoint.every={args.size - 2}"]),
    ):
        events = [
            timed(directory / f"{kind}-{n}", Event(args.size, "kill"), [*own, *args.set]) for n in range(args.rounds)
        ]
        numbers += [
            Number(
                what=f"SIGKILL to the end of the next step, from {kind}", values=[e.next_step for e in events], unit="s"
            ),
            Number(
                what=f"SIGKILL to the end of a new step, from {kind}", values=[e.new_step for e in events], unit="s"
            ),
        ]
    return Report(name="recovery kill", size=f"after {args.size} steps", numbers=numbers)


def resize(args: argparse.Namespace, directory: Path) -> Report:
    numbers = []
    for before, after in ((2, 1), (1, 2)):
        events = [
            timed(
                directory / f"{before}-{after}-{n}",
                Event(args.size, f"roles.actor.ranks={after}"),
                [*args.set, f"roles.actor.ranks={before}"],
            )
            for n in range(args.rounds)
        ]
        numbers.append(Number(what=f"{before} -> {after} ranks", values=[e.next_step for e in events], unit="s"))
    return Report(name="recovery resize", size=f"after {args.size} steps", numbers=numbers)


def timed(directory: Path, event: Event, settings: Sequence[str]) -> Event:
    with run(directory, "run.steps=100000", *settings) as watched:
        ended = watched.wait(WITHIN, event)
        if not event.new_step:
            sys.exit(f"the run did not go on; it ended with {ended.status}:\n{ended.output[-4000:]}")
    return event


def require_finished(ended: Ended) -> Ended:
    if ended.status:
        sys.exit(f"the run ended with {ended.status}:\n{ended.output[-4000:]}")
    return ended


def main() -> None:
    command = parser(__doc__, rounds=3, size=10, unit="steps before a kill or a resize")
    command.add_argument("part", nargs="*", default=list(PARTS), choices=[*PARTS, list(PARTS)], metavar="PART")
    command.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of all runs")
    args = command.parse_args()
    with tempfile.TemporaryDirectory(prefix="corerl-recovery-") as name:
        reports = [globals()[part](args, Path(name) / part) for part in args.part]
    note = "Seconds are from outside: until the step's line is in metrics.jsonl."
    finish(evolve(joined("recovery", reports), note=note), args.output)


if __name__ == "__main__":
    main()
