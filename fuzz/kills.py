"""`python -m fuzz.kills --trials 5 --seed 0`: kill or stop random processes of a small run, and check how it ends.

Each trial sends SIGKILL or SIGSTOP to a rank, an engine, the driver or a reward worker at a random moment of a step, a
save or an update. The run must recover or end within a bound, and name the process; what its newest checkpoint resumes
must give the metrics of an unharmed run to the last digit. Prints a line for each trial, and a table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from corerl.checkpoint.commit import latest

ROOT = Path(__file__).resolve().parents[1]
STEPS = 6
HEALTH_SECONDS = 30.0  # without a heartbeat; fewer may be missing on a busy machine
BOUND_SECONDS = 240.0  # for a run to recover and finish, or to end
GONE_SECONDS = 60.0  # for its other processes to end after it
STOPPED_SECONDS = 5.0  # for which the driver is stopped
VICTIMS = ("actor rank 0", "actor rank 1", "engine-0", "engine-1", "driver", "reward worker")
SETTINGS = [
    *(f"run.steps={STEPS}", "eval.every=0", "extensions=[{name='jsonl'}]", "algorithm.on_mismatch=off"),
    *("rollout.prompts=8", "rollout.samples=4", "rollout.restarts=2", "train.restarts=2"),
    *("reward.processes=1", "reward.timeout=20", "checkpoint.every=1", "checkpoint.keep=0"),
    *("cluster.watchdog=5", f"cluster.health_timeout={HEALTH_SECONDS}", "train.schedule.steps=6"),
]
# The driver writes its processes' ids, by name, into a directory.
DRIVER = """
import sys
from pathlib import Path
from corerl.cluster.heartbeat import Member
directory, receive = Path(sys.argv.pop(1)), Member.receive
def recorded(self, beat):
    receive(self, beat)
    (directory / self.name).write_text(str(beat.pid))
Member.receive = recorded
from corerl.cli.main import main
sys.exit(main())
"""


@frozen
class Trial:
    victim: str
    signal: signal.Signals
    step: int  # steps done before
    fraction: float  # of a step's time, after which the signal is sent


def numbers(run_dir: Path) -> dict[int, Mapping[str, Any]]:
    """The metrics of each step, the last time that it was done, without what a clock measured."""
    file = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []
    measured = ("time/", "perf/", "idle/", "memory/")
    return {
        line["step"]: {name: value for name, value in line.items() if not name.startswith(measured)}
        for line in lines
        if "train/loss" in line
    }


class Driver:
    """A run in a session of its own, with its output in files."""

    def __init__(self, directory: Path, *settings: str) -> None:
        self.run_dir, self.members = directory / "run", directory / "members"
        self.members.mkdir(parents=True, exist_ok=True)
        self.output = directory / f"output-{len(list(directory.glob('output-*')))}"
        with self.output.open("w") as output:
            arguments = [str(self.members), "train", str(ROOT / "examples/quickstart.toml"), *SETTINGS, *settings]
            self.process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, *arguments, f"run.dir={self.run_dir}"],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
            )

    def left(self) -> dict[int, str]:
        """The processes of the session that run, with their command lines."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                state, _, _, session = (directory / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.process.pid and state != "Z":
                    line = (directory / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(directory.name)] = line.decode(errors="replace")
        return found

    def pid(self, victim: str) -> int | None:
        if victim == "driver":
            return self.process.pid
        if victim == "reward worker":
            return next((pid for pid, line in self.left().items() if "spawn_main" in line), None)
        file = self.members / victim
        return int(file.read_text() or 0) or None if file.exists() else None

    def wait_for(self, steps: int) -> None:
        deadline = time.monotonic() + BOUND_SECONDS
        while len(numbers(self.run_dir)) < steps and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def finish(self) -> int | None:
        """The exit status; None if it has not ended within the bound."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(BOUND_SECONDS)
        return self.process.returncode

    def seconds_until_gone(self) -> float:
        """Until no process of the session is left; those that stay for too long are killed."""
        began = time.monotonic()
        while self.left() and time.monotonic() - began < GONE_SECONDS:
            time.sleep(0.1)
        seconds = time.monotonic() - began
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return seconds


def faults(trial: Trial, directory: Path, step_seconds: float, wanted: Mapping[int, Any]) -> Iterator[str]:
    """Carry out a trial; yields what is wrong, after one line of what happened."""
    driver = Driver(directory)
    driver.wait_for(trial.step)
    time.sleep(trial.fraction * step_seconds)
    sent = False
    if (pid := driver.pid(trial.victim)) is not None and driver.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, trial.signal)
            sent = True
    began = time.monotonic()
    if trial.victim == "driver" and trial.signal == signal.SIGSTOP:
        time.sleep(STOPPED_SECONDS)
        os.kill(driver.process.pid, signal.SIGCONT)
    status = driver.finish()
    ended, gone = time.monotonic() - began, driver.seconds_until_gone()
    text = driver.output.read_text()
    named = sent and re.search(rf"{trial.victim}\b.*(during|optimizer step)", text) is not None
    result = "not sent" if not sent else "recovered" if status == 0 else f"ended with {status}"
    yield f"{result} after {ended:.0f} s, processes gone after {gone:.0f} s{', named' if named else ''}"
    if status is None:
        yield f"not ended within {BOUND_SECONDS:g} s"
    if gone >= GONE_SECONDS:
        yield f"processes outlived the run for {GONE_SECONDS:g} s"
    if sent and trial.victim.startswith(("actor", "engine")) and status != 0 and not named:
        yield f"{trial.victim} is not named: {text.splitlines()[-1:]}"
    if status != 0:
        newest = latest(driver.run_dir) if driver.run_dir.exists() else None
        again = Driver(directory, "checkpoint.resume=auto")
        if again.finish() != 0:
            yield f"does not resume from {newest}: {again.output.read_text().splitlines()[-1:]}"
        again.seconds_until_gone()
    if (found := numbers(driver.run_dir)) != wanted:
        yield f"metrics differ at steps {[step for step in wanted if found.get(step) != wanted[step]]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.kills", description="Kill processes of runs at random.")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chosen, table = random.Random(args.seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="corerl-kills-") as place:
        unharmed = Driver(Path(place) / "unharmed")
        unharmed.wait_for(1)
        began = time.monotonic()
        if unharmed.finish() != 0:
            print(unharmed.output.read_text())
            return 1
        step_seconds, wanted = (time.monotonic() - began) / (STEPS - 1), numbers(unharmed.run_dir)
        for number in range(args.trials):
            kind = chosen.choice([signal.SIGKILL, signal.SIGSTOP])
            trial = Trial(chosen.choice(VICTIMS), kind, chosen.randrange(STEPS), chosen.random())
            what = f"{trial.signal.name} to {trial.victim}"
            happened, *wrong = faults(trial, Path(place) / str(number), step_seconds, wanted)
            moment = f"in step {trial.step + 1} at {trial.fraction:.0%}"
            print(f"{number}: {what} {moment}: {happened}{''.join(f'; WRONG: {each}' for each in wrong)}", flush=True)
            table[f"{what}: {'wrong' if wrong else happened.partition(' after')[0]}"] += 1
    for result, times in sorted(table.items()):
        print(f"{times:4} {result}")
    return int(any(result.endswith(": wrong") for result in table))


if __name__ == "__main__":
    sys.exit(main())
