"""Three extensions that wrap every hook and record the order of calls, for the suite to stack around a backend."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from attrs import evolve

from corerl.plugin import API, ExtensionSpec, NoOptions, Process

NAMES = ("FIRST", "SECOND", "THIRD")


class Wrapper:
    """Appends a line [process, wrapper, hook, "in" or "out"] to `calls.jsonl` in the run's directory."""

    name: str

    def __init__(self, options: NoOptions, run_dir: str) -> None:
        self.file = Path(run_dir) / "calls.jsonl"

    def around(self, hook: str) -> Generator[None, Any, Any]:
        self.tell(hook, "in")
        result = yield
        self.tell(hook, "out")
        return result

    def tell(self, *what: str) -> None:
        with self.file.open("a") as file:  # appends of short lines are atomic
            file.write(json.dumps([os.getpid(), self.name, *what]) + "\n")

    def init(self, config: Any, context: Any) -> Generator[None, Any, Any]:
        import torch

        seen = {"rank": context.rank, "pid": os.getpid(), "threads": torch.get_num_threads(), "env": dict(os.environ)}
        self.file.with_name(f"process-{context.rank}.json").write_text(json.dumps(seen))
        return (yield from self.around("init"))

    def forward_backward(self) -> Generator[None, Any, Any]:
        return (yield from self.around("forward_backward"))

    def optimizer_step(self) -> Generator[None, Any, Any]:
        return (yield from self.around("optimizer_step"))

    def forward(self) -> Generator[None, Any, Any]:
        return (yield from self.around("forward"))

    def save(self) -> Generator[None, Any, Any]:
        return (yield from self.around("save"))

    def update_weights(self) -> Generator[None, Any, Any]:
        return (yield from self.around("update_weights"))


class First(Wrapper):
    name = "FIRST"


class Second(Wrapper):
    name = "SECOND"


class Third(Wrapper):
    name = "THIRD"


FIRST = ExtensionSpec(
    implementation=f"{__name__}:First",
    config=NoOptions,
    api=API,
    summary="reports every call",
    process=Process.WORKER,
)
SECOND = evolve(FIRST, implementation=f"{__name__}:Second")
THIRD = evolve(FIRST, implementation=f"{__name__}:Third")
