"""Run torch's profiler on chosen optimizer steps: writes RUN_DIR/profile/actor-0-step-2.json and a table for each."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from corerl.config import RoleConfig
from corerl.plugin import Context
from corerl.types import GradientResult, InitResult, Step, StepResult
from corerl_observe.specs import ProfilerOptions
from corerl_observe.step_ranges import step_ranges

PROFILE_DIR = "profile"


class Profiler:
    """Wraps the halves of a step. A profiler exists only in a chosen one, so nothing holds its memory afterwards."""

    def __init__(self, *, options: ProfilerOptions, run_dir: str) -> None:
        self._options = options
        self._steps = step_ranges(options.steps)
        self._directory = Path(run_dir) / PROFILE_DIR
        self._name = ""  # of the files: role-rank
        self._activities = [ProfilerActivity.CPU]
        self._on = False
        self._next = 0  # the step that gradients are added for
        self._profiler: profile | None = None

    def init(self, config: RoleConfig, context: Context) -> Generator[None, InitResult, InitResult]:
        self._name = f"{context.role}-{context.rank}"
        self._on = not self._options.ranks or context.rank in self._options.ranks
        if config.device == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        result = yield
        self._next = result.optimizer_step
        if self._on:
            self._directory.mkdir(parents=True, exist_ok=True)
        return result

    def forward_backward(self) -> Generator[None, GradientResult, GradientResult]:
        if self._on and self._next in self._steps and self._profiler is None:
            self._profiler = self._started()
        try:
            return (yield)
        except BaseException:
            self._stopped()
            raise

    def optimizer_step(self, step: Step) -> Generator[None, StepResult, StepResult]:
        try:
            result = yield
        finally:
            profiler = self._stopped()
        self._next = step.optimizer_step + 1
        if profiler is not None:
            self._write(profiler, step)
        return result

    def _stopped(self) -> profile | None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
        return profiler

    def _started(self) -> profile | None:
        """Start a profiler; None if another one runs in this process, since torch crashes with two. Must not raise: the
        other ranks go on into collectives."""
        options = self._options
        if torch.autograd._profiler_enabled():
            print(f"warning: {self._name} is not profiled: another profiler runs in its process", file=sys.stderr)
            return None
        profiler = profile(
            activities=self._activities,
            with_stack=options.with_stack,
            record_shapes=options.record_shapes,
            profile_memory=options.profile_memory,
            acc_events=True,  # avoids torch's warning about clearing events between cycles; there is one
        )
        profiler.start()
        return profiler

    def _write(self, profiler: profile, step: Step) -> None:
        path = self._directory / f"{self._name}-step-{step.optimizer_step}"
        device = "cuda" if ProfilerActivity.CUDA in self._activities else "cpu"
        table = profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=self._options.rows)
        profiler.export_chrome_trace(f"{path}.json")
        Path(f"{path}.txt").write_text(table, encoding="utf-8")
