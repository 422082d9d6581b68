"""Run `corerl train` as a user starts it and watch it from outside: its metrics, its processes, and a deadline."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from attrs import frozen

from benchmarks.report import ROOT
from benchmarks.shapes import EXPERTS, SHAPES, SIZES

# What every process of a run is given: no more threads than it has work for, no network, one interface.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # Ray's workers find modules of this folder where the driver finds them.
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
}
POLL_SECONDS = 0.02
QUICKSTART = ROOT / "examples" / "quickstart.toml"
MAIN = "import sys; from corerl.cli.main import main; sys.exit(main())"
# The quickstart's shards are for its small model.
LARGE = ("backends.fsdp.shard_size=0",)
# The quickstart's model in a size that SGLang's kernels take; in half precision.
SMALL_SHAPE = (
    *("model.config.hidden_size=256", "model.config.intermediate_size=512", "model.config.head_dim=64"),
    "model.config.max_position_embeddings=2048",
)
FIELDS = ("model_type", *SIZES, "tie_word_embeddings", *EXPERTS)
TIMES = re.compile("time/|idle/")
# What makes SGLang's server start sooner, and what works without its own kernels for attention.
SERVER = {
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_prefill_cuda_graph": True,
    "cuda_graph_max_bs_decode": 256,
}


@frozen(kw_only=True)
class Ended:
    """What a run left."""

    status: int | None  # its exit status; None where it had not ended
    seconds: float  # from its start
    steps: Sequence[Mapping[str, float]]  # metrics of each rollout step
    output: str

    def mean(self, name: str, *, after: int = 0) -> float:
        """Of one metric over the steps that have it, the first `after` left out."""
        values = [step[name] for step in self.steps[after:] if name in step]
        return sum(values) / len(values) if values else float("nan")

    def phases(self, *, after: int) -> dict[str, float]:
        """Mean seconds by phase, where the step itself is one."""
        names = dict.fromkeys(name for step in self.steps[after:] for name in step if name.startswith("time/"))
        return {name.removeprefix("time/"): self.mean(name, after=after) for name in names}


class Process:
    """A program. Use it as a context: whatever is left of it is killed at the end."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        directory: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
        cwd: Path | None = None,
    ):
        """Its output goes to a file in `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        self._output = directory / "output"
        self.temporary = Path(tempfile.mkdtemp(prefix="corerl-"))  # a short path: names of sockets are cut off
        self._began = time.monotonic()
        with self._output.open("wb") as sink:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **environment, "TMPDIR": str(self.temporary)},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends the program too
        return self

    def __exit__(self, *_: object) -> None:
        for _again in range(3):  # who is killed may just have started another
            for pid in self.processes():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it has ended meanwhile
        self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def now(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._began

    def output(self) -> str:
        """What it has printed so far."""
        return self._output.read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        """All that come of it, with their command lines: those of its session, and what these have started."""
        table: dict[int, tuple[int, int]] = {}  # pid: (parent, session)
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                state, parent, _, session = (directory / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:  # it has ended meanwhile
                continue
            if state != "Z":
                table[int(directory.name)] = int(parent), int(session)
        found = {pid for pid, (_, session) in table.items() if session == self.process.pid}
        while more := {pid for pid, (parent, _) in table.items() if parent in found} - found:
            found |= more
        return {pid: _command_line(pid) for pid in sorted(found)}


class Watched(Process):
    """A run of `corerl train`."""

    def __init__(
        self,
        *settings: str,
        directory: Path,
        config: Path = QUICKSTART,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """In `directory`, which must not have held a run; `settings` as on the command line."""
        self.directory = directory / "run"
        own = [f"run.dir={self.directory}", "extensions=[{name='jsonl'},{name='console'}]"]
        self.command = " ".join(["corerl train", os.path.relpath(config, ROOT), *settings])
        command = [sys.executable, "-c", MAIN, "train", str(config), *own, *settings]
        super().__init__(command, directory=directory, environment=environment)

    def lines(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl so far."""
        path = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait(self, deadline: float, check: Callable[[Watched], bool | None] = lambda watched: None) -> Ended:
        """Until it ends, or `deadline` seconds after its start, or `check`, which is called every few milliseconds
        meanwhile, says with True that it has seen enough."""
        while (status := self.process.poll()) is None and time.monotonic() - self._began < deadline:
            if check(self):
                break
            time.sleep(POLL_SECONDS)
        lines = self.lines()
        return Ended(
            status=status,
            seconds=time.monotonic() - self._began,
            steps=[line for line in lines if "time/step" in line],
            output=self.output(),
        )


def value(given: Any) -> str:
    """As the command line takes it: TOML."""
    if isinstance(given, Mapping):
        return "{" + ",".join(f"{key}={value(each)}" for key, each in given.items()) + "}"
    if isinstance(given, bool):
        return str(given).lower()
    if isinstance(given, list):
        return "[" + ",".join(map(value, given)) + "]"
    return f"'{given}'" if isinstance(given, str) else str(given)


def shape_settings(shape: str, *, micro_batch: int) -> list[str]:
    """A model of this shape with random weights, trained in bfloat16 on GPUs."""
    fields = {name: each for name, each in SHAPES[shape].items() if name in FIELDS}
    return [
        *(f"model.config.{name}={value(each)}" for name, each in fields.items()),
        *("model.config.max_position_embeddings=4096", "model.config.initializer_range=0.02"),
        *("cluster.device=cuda", "train.precision=bfloat16", f"train.tokens_per_micro_batch={micro_batch}"),
    ]


def say_steps(ended: Ended, *, well: bool) -> None:
    """What each step took, and if the run did not end well, why."""
    if not well:
        print(f"the run ended with {ended.status} after {len(ended.steps)} steps:\n{ended.output[-4000:]}")
    for number, step in enumerate(ended.steps):
        took = (f"{name.removeprefix('time/')} {each:.3g}" for name, each in step.items() if TIMES.match(name))
        print(f"step {number}, in seconds: {', '.join(took)}", flush=True)


def sglang(*, launcher: str = "", **options: Any) -> list[str]:
    """Settings of a run that samples with SGLang. `launcher` starts something else in its place."""
    server = {**({} if launcher else SERVER), **options.pop("server", {})}
    if launcher:
        options["launcher"] = launcher
    return [
        "rollout.engine=sglang",
        f"engines.sglang.server={value(server)}",
        *(f"engines.sglang.{name}={value(each)}" for name, each in options.items()),
    ]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(bytes(1), b" ").decode(errors="replace").strip()
    except OSError:
        return ""
