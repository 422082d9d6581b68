"""Recipes of the unchanged cookbook, run as a user runs them against `corerl serve`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from plugins.tinker.tests.recipes import workplace
from tests.end_to_end.command import STARTS_WITHIN, Command
from tests.machine import paced

VARIABLE = "TINKER_PYTHON"  # a Python that has the SDK and the cookbook, as `make test-tinker` installs them
ENDS_WITHIN = paced(120.0)  # seconds, against hangs
SILENT_MINUTES = 0.3  # after which a client that was killed is given up; it sends a heartbeat every 10 s
SERVER = f"""
backend.name = "plain"
cluster.device = "cpu"
model.path = "{workplace.MODEL}"
weights.transport = "disk"

[rollout]
engine = "transformers"
max_tokens = 64

[train]
tokens_per_micro_batch = 8192
[train.optimizer]
betas = [0.9, 0.95]
eps = 1e-8
weight_decay = 0.0
clip_norm = 0.0

[serve]
port = 0
idle_minutes = {SILENT_MINUTES}
"""
Metrics = list[dict[str, Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker("nightly")
            item.add_marker("processes")
            if VARIABLE not in os.environ:
                item.add_marker(pytest.mark.skip(reason=f"{VARIABLE} is not set; `make test-tinker` sets it"))


class Serving:
    """`corerl serve`, until the context ends."""

    def __init__(self, directory: Path, *overrides: str, file: str = "server.toml") -> None:
        """`directory` is the workplace, which has the config `file`."""
        self.directory = directory
        self.command = Command("serve", file, *overrides, logs=directory, directory=directory)

    def __enter__(self) -> Serving:
        self.command.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.command.__exit__(*error)

    @property
    def environment(self) -> Mapping[str, str]:
        """The two variables of clients, once they are printed."""
        return self.command.until(lambda: printed(self.command.out), "serving", STARTS_WITHIN)  # type: ignore[no-any-return]


def printed(out: str) -> dict[str, str]:
    found = dict(re.findall(r"^export (TINKER_\w+)=(\S+)$", out, re.MULTILINE))
    return found if len(found) == 2 else {}


@frozen
class Recipe:
    """A recipe that runs as a process of its own."""

    process: subprocess.Popen[bytes]
    log: Path  # its directory
    output: Path

    def metrics(self) -> Metrics:
        """Those of each step so far."""
        file = self.log / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ENDS_WITHIN
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()[-8000:]
            time.sleep(0.01)

    def finish(self, metric: str) -> Metrics:
        """The metrics of the steps that have this one: the last line may have none, and tell of the whole."""
        try:
            status = self.process.wait(ENDS_WITHIN)
        finally:
            self.process.kill()
        assert status == 0, self.output.read_text()[-8000:]
        return [step for step in self.metrics() if metric in step]


def begin(serving: Serving, log: str, words: str, *, answer: str = "") -> Recipe:
    """`python -m tinker_cookbook.recipes.WORDS` with the model in the workplace, where `log` is its directory. `answer`
    is to what it asks where that exists."""
    name, *arguments = words.split()
    shared = (f"log_path={log}", f"model_name={workplace.MODEL}")
    process, output = run(serving, log, "-m", f"tinker_cookbook.recipes.{name}", *shared, *arguments, answer=answer)
    return Recipe(process, serving.directory / log, output)


def run(serving: Serving, log: str, *words: str, answer: str = "") -> tuple[subprocess.Popen[bytes], Path]:
    """`python WORDS` with the environment of clients, and the file of what it prints."""
    without = {"PYTHONPATH", "CORERL_DEBUG"}
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    environment = {
        **inherited,
        **serving.environment,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(serving.directory / "cache"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    output = serving.directory / f"{log}.txt"
    with output.open("ab") as out, tempfile.TemporaryFile() as answers:
        answers.write(f"{answer}\n".encode())
        answers.seek(0)
        process = subprocess.Popen(
            [os.environ[VARIABLE], *words],
            cwd=serving.directory,
            env=environment,
            stdin=answers,
            stdout=out,
            stderr=out,
        )
    return process, output


@pytest.fixture(scope="session")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workplace."""
    directory = tmp_path_factory.mktemp("offline")
    workplace.write(directory)
    (directory / "server.toml").write_text(SERVER)
    return directory


@pytest.fixture(scope="module")
def serving(offline: Path) -> Iterator[Serving]:
    """A server on the plain backend that trains all weights."""
    with Serving(offline) as found:
        yield found
