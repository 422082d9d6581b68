"""The loop itself: short enough to read at once, and every verb in its place."""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import frozen

from corerl import loop
from corerl.config.schema import BackendChoice, Config, RunConfig
from corerl.driver.progress import Progress
from corerl.driver.run import Summary
from corerl.plugin.observers import Observers

ONE_SCREEN = 40  # lines


def test_the_loop_reads_on_one_screen() -> None:
    source = inspect.getsource(loop)
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    function = next(node for node in functions if node.name == "training")
    assert function.end_lineno is not None
    assert function.end_lineno - function.lineno + 1 <= ONE_SCREEN
    assert max(len(line) for line in source.splitlines()) <= 120
    rollout_steps = [node for node in ast.walk(function) if isinstance(node, ast.For)]
    assert [ast.unparse(node.iter) for node in rollout_steps] == ["run.rollouts()"]


@frozen(kw_only=True)
class FakeBatch:
    samples: str


class FakeRun:
    """Notes what the loop asks for, and in which order."""

    def __init__(self, steps: int, *, stop_in: int = -1) -> None:
        self.log: list[str] = []
        self.steps = steps
        self.stopping = False
        self.stop_in = stop_in
        self.progress = Progress(Observers([]), 5)
        self.plan = SimpleNamespace(run=RunConfig())

    def rollouts(self) -> Iterator[tuple[str, str]]:
        return ((f"batch {step}", f"gradients of {step}") for step in range(self.steps))

    def push_weights(self) -> None:
        self.log.append("push")

    def push_weights_and_sleep(self) -> None:
        self.push_weights()
        self.sleep_ranks()

    def check_logprobs(self) -> None:
        self.log.append("check")

    def evaluate(self) -> None:
        self.log.append(f"evaluate {self.progress.steps_done}")

    @contextlib.contextmanager
    def rewinding_if_ranks_die(self) -> Iterator[None]:
        yield

    def sleep_ranks(self) -> None:
        self.log.append("ranks sleep")

    def prepare(self, scored: str, streamed: str) -> FakeBatch:
        assert streamed == scored.replace("batch", "gradients of")
        return FakeBatch(samples=f"samples of {scored}")

    def optimize(self, batch: FakeBatch) -> str:
        self.log.append(f"train on {batch.samples} at {self.progress.steps_done}")
        self.stopping = self.stopping or self.progress.steps_done == self.stop_in
        return f"results of {batch.samples}"

    def report_step(self, scored: str, batch: FakeBatch, results: str) -> None:
        self.log.append(f"report {scored}: {results}")

    def save(self) -> None:
        self.log.append(f"save {self.progress.steps_done}")

    def between_steps(self) -> None:
        self.log.append("between steps")

    def finish(self) -> Summary:
        self.log.append("finish")
        return Summary(reason="finished", run_dir=Path(), steps_done=self.progress.steps_done)


def run_loop(monkeypatch: pytest.MonkeyPatch, run: FakeRun) -> Summary:
    @contextlib.contextmanager
    def launch(plan: Any, *, began: float) -> Iterator[Any]:
        yield run
        run.log.append("end")

    plan = SimpleNamespace(started_by=lambda forks: None)
    monkeypatch.setattr(loop, "make_plan", lambda config: plan)
    monkeypatch.setattr(loop, "launch", launch)
    return loop.train(Config(backend=BackendChoice(name="any")))


# Ranks and engines take turns from the beginning: nothing is sampled while the ranks are resident. Whether the engines
# compute what the ranks do is known before the first evaluation.
BEGINNING = ["push", "ranks sleep", "check"]


def rollout_step(batch: int, number: int) -> list[str]:
    return [
        f"train on samples of batch {batch} at {number}",
        "push",
        f"report batch {batch}: results of samples of batch {batch}",
        f"save {number + 1}",
        "between steps",
        "ranks sleep",
        f"evaluate {number + 1}",
    ]


def test_a_step_trains_then_updates_engines_then_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = FakeRun(steps=2)
    assert run_loop(monkeypatch, run).steps_done == 7
    assert run.log == [
        *BEGINNING,
        "evaluate 5",
        *rollout_step(0, 5),
        *rollout_step(1, 6),
        *["finish", "end"],
    ]


def test_a_stop_request_ends_the_run_after_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(steps=9, stop_in=5)
    assert run_loop(monkeypatch, run).steps_done == 6
    assert run.log == [*BEGINNING, "evaluate 5", *rollout_step(0, 5), "finish", "end"]


def test_a_run_that_only_samples_repeats_its_check_after_a_death() -> None:
    """No later step would. Ranks die in the first check."""

    class Dying(FakeRun):
        deaths = 1

        @contextlib.contextmanager
        def rewinding_if_ranks_die(self) -> Iterator[list[str]]:  # type: ignore[override]
            died: list[str] = []
            try:
                yield died
            except ConnectionError as death:
                died.append(str(death))
                self.log.append("restore")

        def check_logprobs(self) -> None:
            if self.deaths:
                self.deaths -= 1
                raise ConnectionError("a rank died")
            super().check_logprobs()

    run = Dying(steps=0)
    loop.sampling(run)  # type: ignore[arg-type]
    assert run.log == ["push", "ranks sleep", "restore", "push", "ranks sleep", "check", "evaluate 5"]
