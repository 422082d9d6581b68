"""The command `corerl` as a user starts it: watched, sent signals, and searched for what it leaves behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.end_to_end.small import SMALL
from tests.forks.client import Forked, forked_for, processes_of
from tests.forks.ray import environment, shared
from tests.machine import paced, wait_for_memory

ROOT = Path(__file__).resolve().parents[2]
STARTS_WITHIN = paced(240.0)  # seconds, against hangs: processes start, import and meet
ENDS_WITHIN = paced(30.0)  # seconds in which a run has ended after a fault, a second signal, or its driver's death
GIB = 2.0  # of memory that a run's processes take, forked as they are

FORKED = """
{before}
import sys
from contextlib import nullcontext
from tests.forks.ray import fork_workers, joined, without_fork_server
fork_workers()
with {join}:
    from corerl.cli.main import main
    status = main()
sys.exit(status)
"""


def write_small(directory: Path) -> Path:
    """The quickstart's task in a size that takes seconds, two ranks and one engine; returns the file."""
    path = directory / "small.toml"
    path.write_text(SMALL)
    return path


class Command:
    """`corerl ARGUMENTS`, begun at once in a fork of what has imported its modules. Use it as a context: whatever is
    left of it is killed at the end."""

    def __init__(
        self,
        *arguments: str | Path,
        logs: Path,
        directory: Path | None = None,
        packages: Path = ROOT,
        before: str = "",
        own_ray: bool = False,
        own_forks: bool = False,
    ) -> None:
        """`packages` is where Python looks first, and `before` is what its process runs first. With `own_ray` it starts
        Ray on this machine, as users do; else it joins the one that this test process has. With `own_forks` too, the
        run's own server imports for seconds what its workers need; else they are forked from that of the tests."""
        wait_for_memory(GIB, "a run")
        name = uuid.uuid4().hex
        self._paths = (logs / f"{name}.out", logs / f"{name}.err")
        self._ray = None if own_ray else shared()
        self._others = {} if self._ray is None else forked_for(self._ray.session)  # such as its dashboard
        join = "nullcontext()" if own_forks else "without_fork_server()"
        code = FORKED.format(before=before, join=f"joined({self._ray.address!r})" if self._ray else join)
        without = {"CORERL_DEBUG", *(["RAY_AUTH_MODE"] if own_ray else [])}
        own = environment(PYTHONPATH=f"{packages}{os.pathsep}{ROOT}")  # where workers find the tests' own backends too
        given = {name: value for name, value in own.items() if name not in without}
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            program = Path(sys.executable).with_name("corerl")
            words = [program, *map(str, arguments)]
            self.process = Forked(words, code, environment=given, stdout=out, stderr=err, directory=directory)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def out(self) -> str:
        return self._paths[0].read_text()

    @property
    def err(self) -> str:
        return self._paths[1].read_text()

    @property
    def errors(self) -> list[str]:
        """The lines of stderr but for the run's notices, which are there where no extension shows them."""
        return [line for line in self.err.splitlines() if not line.startswith("corerl: note: ")]

    def processes(self) -> dict[int, str]:
        """Every process that comes of the command and runs now, itself included, with its command line.

        All of them are in its session, or were forked for one that is: none of Ray's processes leaves it.
        """
        of_ray = forked_for(self._ray.session) if self._ray else {}
        return processes_of(self.process.pid) | {pid: of_ray[pid] for pid in of_ray.keys() - self._others.keys()}

    def finish(self, within: float = STARTS_WITHIN) -> int:
        """Wait for the exit status."""
        try:
            return self.process.wait(timeout=within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within:g} s\n{self.out}\n{self.err}") from None

    def until(self, condition: Callable[[], Any], what: str, within: float = STARTS_WITHIN) -> Any:
        """Wait until `condition` gives something true, and return it."""
        deadline = time.monotonic() + within
        while True:
            if found := condition():
                return found
            assert self.process.poll() is None, f"ended before {what}\n{self.out}\n{self.err}"
            assert time.monotonic() < deadline, f"not {what} within {within:g} s\n{self.out}\n{self.err}"
            time.sleep(0.01)

    def signal_group(self, number: signal.Signals) -> None:
        """To the whole process group, as a terminal sends SIGINT."""
        os.killpg(self.process.pid, number)

    def assert_nothing_is_left(self, *, killed: bool = False) -> None:
        """No process of the run is there any more, or soon. If the driver was `killed`, Ray's agents look for GCS for a
        minute; they hold no device."""
        deadline = time.monotonic() + ENDS_WITHIN
        while left := [
            f"{pid} {line[:200]}" for pid, line in self.processes().items() if not (killed and "agent" in line.lower())
        ]:
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.05)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl; none where there is no file yet."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def steps_done(run_dir: Path) -> int:
    """Rollout steps that metrics.jsonl tells of."""
    return sum("train/loss" in line for line in metrics(run_dir))


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock measured."""
    return [
        {name: value for name, value in line.items() if not name.startswith(("time/", "perf/", "idle/"))}
        for line in metrics(run_dir)
    ]


def content(directory: Path) -> dict[str, str]:
    """Every file and what it holds, in short."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
