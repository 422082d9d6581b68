"""`python -m fuzz.kills --trials 24 --seed 0`: kill or stop random processes of small runs, and check how they end.

A trial sends SIGKILL or SIGSTOP to a process at a random moment of the start, a step with its save and update, or a
resize. The run must recover or end within a bound and name the process and the step; it, or what resumes its newest
checkpoint, must have the metrics of an unharmed run to the last digit. Prints a line for each trial, then a table.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from attrs import define, field

from corerl.checkpoint.commit import latest, read_state
from corerl.errors import ConfigError
from corerl.observability.jsonl import read_notices
from corerl_elastic.scaling import ask
from tests.end_to_end import command
from tests.forks.client import DIRECTORY, OWNER, connect

STEPS = 6
BOUND_SECONDS, WORKERS_SECONDS = 240.0, 30.0  # for a run to end, recovered or not, and then for all but Ray's agents
RAY_SECONDS = 90.0  # for these, which hold no device: they look for the GCS of a driver that was killed for 60 s
VICTIMS = ("actor rank 0", "actor rank 1", "engine-0", "engine-1", "driver", "reward worker")
SETTINGS = [
    *(f"run.steps={STEPS}", "eval.every=0", "extensions=[{name='jsonl'},{name='elastic'}]", "train.schedule.steps=6"),
    *("rollout.restarts=2", "train.restarts=2", "algorithm.on_mismatch=off"),
    *("reward.processes=1", "reward.timeout=20", "checkpoint.every=1", "checkpoint.keep=0"),
    # On a busy machine a healthy process may send no heartbeat for long.
    *("cluster.watchdog=10", "cluster.health_timeout=25", "cluster.start_timeout=90"),
]
# The driver writes its processes' ids, by name, into a directory.
BEFORE = """
from corerl.cluster import heartbeat
from corerl.cluster.heartbeat import Member
heartbeat.BEAT_SECONDS = 0.1  # a run takes few seconds, and ids come with heartbeats
receive = Member.receive
def recorded(self, beat):
    receive(self, beat)
    open({directory!r} + "/" + self.name, "w").write(str(beat.pid))
Member.receive = recorded
"""


@define
class Trial:
    victim: str
    signal: signal.Signals
    step: int  # steps done before
    fraction: float  # of the time of a step, a start or a resize, after which the signal is sent
    resize: bool
    result: str = "not sent"
    seconds: float = 0.0  # until the run has ended
    wrong: list[str] = field(factory=list)


def numbers(run_dir: Path) -> dict[int, Mapping[str, Any]]:
    """The metrics of each step, the last time that it was done."""
    return {line["step"]: line for line in command.numbers(run_dir) if "train/loss" in line}


def differences(found: Path, wanted: Path, resized: int) -> Iterator[str]:
    """Of two run directories. From the step `resized` on, one rank rounds otherwise than two did."""
    for step, metrics in numbers(wanted).items():
        own, within = numbers(found).get(step, {}), 1e-4 if step >= resized else 0.0
        far = [n for n, v in metrics.items() if n not in own or abs(own[n] - v) > within * abs(v) + within / 10]
        if far:
            yield f"step {step + 1}: {len(far)} metrics differ, such as {far[-1]}: {own.get(far[-1])}"


class Run(command.Command):
    """A run with a Ray of its own, whose processes are forked from one that has imported their modules."""

    def __init__(self, directory: Path, *settings: str) -> None:
        self.run_dir, self.members = directory / "run", directory / "members"
        self.members.mkdir(parents=True, exist_ok=True)
        config = str(command.ROOT / "examples/quickstart.toml")
        words = ["train", config, *SETTINGS, *settings, f"run.dir={self.run_dir}"]
        super().__init__(*words, logs=directory, before=BEFORE.format(directory=str(self.members)), own_ray=True)
        (self.members / "driver").write_text(str(self.process.pid))

    def pid(self, victim: str) -> int | None:
        left, file = self.processes(), self.members / victim
        known = file.read_text() if file.exists() else "--multiprocessing-fork" * (victim == "reward worker")
        return next((pid for pid, line in left.items() if known and known in (str(pid), *line.split())), None)

    def resize(self) -> None:
        with contextlib.suppress(ConfigError):  # the run has ended before
            ask(
                self.run_dir,
                ["roles.actor.ranks=1"],
                runs=lambda: self.process.poll() is None,
                notify=lambda line: None,
            )

    def status(self, steps: int = STEPS + 1) -> int | None:
        """Wait until the run has done these steps or ended; its exit status. None if it has not within the bound."""
        until = time.monotonic() + BOUND_SECONDS
        while self.process.poll() is None and len(numbers(self.run_dir)) < steps and time.monotonic() < until:
            time.sleep(0.02)
        return self.process.returncode

    def seconds_until_gone(self) -> tuple[float, float]:
        """Until the run's processes, and until Ray's too, are gone; those that stay for too long are killed."""
        began, workers = time.monotonic(), 0.0
        while (left := self.processes()) and time.monotonic() - began < RAY_SECONDS:
            if not all("Agent" in line for line in left.values()):
                workers = time.monotonic() - began
            time.sleep(0.2)
        self.__exit__()
        return workers, time.monotonic() - began

    def naming(self, victim: str) -> str:
        """The notice with its step, or the lines of the error, that name the victim and a cause; "" if none do."""
        texts = [*(f"step {each.step + 1}: {each.text}" for each in read_notices(self.run_dir)), " ".join(self.errors)]
        cause = f"{victim.removesuffix(' worker')}.*(died|was killed|SIGKILL|longer than)"
        return next((text for text in texts if re.search(cause, text)), "")


def carry_out(trial: Trial, directory: Path, start: float, unharmed: Run) -> str:
    """Returns what happened. `start` is the seconds until the first step of the unharmed run had ended."""
    run, to_driver = Run(directory), trial.victim == "driver"
    run.status(trial.step)
    if trial.resize:  # which starts ranks
        threading.Thread(target=run.resize, daemon=True).start()
    until = time.monotonic() + trial.fraction * (start / 3 if trial.resize else 0.5 if trial.step else start)
    done_by = min(trial.step + 2, STEPS - 1) if trial.step else 1
    while time.monotonic() < until and len(numbers(run.run_dir)) < done_by:
        time.sleep(0.01)
    while not (pid := run.pid(trial.victim)) and run.process.poll() is None:
        time.sleep(0.01)
    sent, done = time.monotonic(), len(numbers(run.run_dir))
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        if pid:
            os.kill(pid, trial.signal)
            trial.result = ""
        if pid and to_driver and trial.signal == signal.SIGSTOP:
            time.sleep(8.0)
            os.kill(pid, signal.SIGCONT)
    status, named = run.status(), run.naming(trial.victim)
    # A reward worker that had no sample is replaced without a word.
    unnoticed = trial.result == "not sent" or trial.victim == "reward worker"
    trial.seconds = time.monotonic() - sent
    trial.result = trial.result or ("recovered" if status == 0 else "ended")
    resumed = None if status == 0 else Run(directory, "checkpoint.resume=auto")  # at once, as a user would
    workers, agents = run.seconds_until_gone()
    again, newest = 0 if resumed is None else resumed.status(), latest(run.run_dir)
    checks = {
        f"has not ended after {BOUND_SECONDS:g} s": status is not None,
        "processes outlive the run": workers < WORKERS_SECONDS and agents < RAY_SECONDS,
        f"not named: {run.err[-300:]}": named or to_driver or (status == 0 and unnoticed),
        f"not resumed: {resumed and resumed.err[-300:]}": again == 0,
        f"the newest checkpoint is {newest}": newest is not None and read_state(newest)["rollout_step"] == STEPS,
    }
    trial.wrong = [text for text, right in checks.items() if not right]
    if "samples failed" not in named:  # one that a stopped reward worker was at has reward.failed_value
        trial.wrong += differences(run.run_dir, unharmed.run_dir, trial.step if trial.resize else STEPS)
    what = f"{trial.victim}, {trial.signal.name} after {done} steps{', resize' * trial.resize}: {trial.result}"
    gone = f"workers gone after {workers:.0f} s, Ray after {agents:.0f} s"
    return "\n   WRONG: ".join([f"{what} in {trial.seconds:.0f} s; {gone}; {named}", *trial.wrong])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.kills")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1, help="trials that go on at the same time")
    args, settings = parser.parse_known_args()
    SETTINGS.extend(settings)  # others are settings of all runs, such as rollout.source=one-step-off
    chosen, trials = random.Random(args.seed), []
    kinds = chosen.sample([*itertools.product(VICTIMS, (signal.SIGKILL, signal.SIGSTOP))], 2 * len(VICTIMS))
    for number in range(args.trials):
        resize = chosen.random() < 0.25
        step, kind = chosen.randrange(resize, STEPS - resize), kinds[number % len(kinds)]
        victim = "actor rank 0" if resize and kind[0] == "actor rank 1" else kind[0]  # the one that goes on
        trials.append(Trial(victim, kind[1], step, chosen.random(), resize))
    with tempfile.TemporaryDirectory(prefix="corerl-") as name, ThreadPoolExecutor(args.at_once) as pool:
        os.environ |= {DIRECTORY: name, OWNER: str(os.getpid())}
        connect().close()  # once what it forks has been imported
        began, unharmed = time.monotonic(), Run(Path(name) / "unharmed")
        unharmed.status(1)
        start = time.monotonic() - began
        unharmed.finish()
        running = [pool.submit(carry_out, each, Path(name) / str(n), start, unharmed) for n, each in enumerate(trials)]
        for future in as_completed(running):
            print(future.result(), flush=True)
    for kind in sorted(kinds):
        same = [each for each in trials if (each.victim, each.signal) == kind]
        results = Counter("wrong" if each.wrong else each.result for each in same)
        print(f"{kind[0]}, {kind[1].name}: {dict(results)}, seconds: {sorted(round(each.seconds) for each in same)}")
    return int(any(trial.wrong for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
