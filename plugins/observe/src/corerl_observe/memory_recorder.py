"""Write the peak memory of each hook call to RUN_DIR/memory/actor-0.jsonl, and next to it torch's snapshots of the
allocations on a CUDA device, for https://pytorch.org/memory_viz."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

import torch
from attrs import evolve

from corerl.config import RoleConfig
from corerl.plugin import Context
from corerl.types import GradientResult, InitResult, Metric, Reduction, Step, StepResult
from corerl_observe.errors import noting_failures
from corerl_observe.specs import MemoryOptions
from corerl_observe.step_ranges import step_ranges

MEMORY_DIR = "memory"
PEAK = "peak_memory_gib"  # the metric: the maximum over ranks


class CudaMeter:
    """Measures what torch's allocator has handed out on this process's device."""

    source = "allocated on the device"
    since = "call"

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def read(self) -> tuple[int, int]:
        """Peak bytes since `begin`, and current bytes."""
        return torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()


class ResidentMeter:
    """Measures this process's resident set, libraries and shared pages included: on a CPU tensors cannot be separated
    from other memory."""

    source = "resident set of the process"

    def __init__(self, directory: str = "/proc/self") -> None:
        self._status, self._reset = Path(directory, "status"), Path(directory, "clear_refs")
        try:
            self.begin()
            self.since = "call"
        except OSError:  # some containers do not allow it
            self.since = "start of the process"

    def begin(self) -> None:
        if getattr(self, "since", "call") == "call":
            self._reset.write_text("5")  # resets the peak (man 5 proc)

    def read(self) -> tuple[int, int]:
        """Peak bytes, and current bytes."""
        lines = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
        peak, now = (int(lines[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS"))
        return peak, now


class MemoryRecorder:
    """Wraps every hook of a backend and records its peak memory."""

    def __init__(self, *, options: MemoryOptions, run_dir: str) -> None:
        self._options = options
        self._snapshots = step_ranges(options.snapshots)
        self._directory = Path(run_dir) / MEMORY_DIR
        self._name = ""
        self._meter: CudaMeter | ResidentMeter | None = None  # None on ranks that are not chosen
        self._cuda = False
        self._file: IO[str] | None = None
        self._next = 0  # the step that gradients are added for
        self._peak = self._of_step = 0  # bytes: of the last call, and of this step so far

    def init(self, config: RoleConfig, context: Context) -> Generator[None, Any, InitResult]:
        self._name = f"{context.role}-{context.rank}"
        if not self._options.ranks or context.rank in self._options.ranks:
            self._cuda = config.device == "cuda"
            self._meter = CudaMeter() if self._cuda else ResidentMeter()
        if self._cuda and self._options.on_out_of_memory:
            self._record(True)
        result: InitResult = yield from self._around("init")
        self._next = result.optimizer_step
        return result

    def forward_backward(self) -> Generator[None, Any, GradientResult]:
        if self._chosen:
            self._record(True)
        result: GradientResult = yield from self._around("forward_backward")
        self._of_step = max(self._of_step, self._peak)
        return result

    def optimizer_step(self, step: Step) -> Generator[None, Any, StepResult]:
        result: StepResult = yield from self._around("optimizer_step", step)
        if self._chosen:
            self._dump(f"step-{step.optimizer_step}")
            self._record(self._options.on_out_of_memory)
        peak, self._of_step, self._next = max(self._of_step, self._peak), 0, step.optimizer_step + 1
        if self._meter is None:
            return result
        return evolve(result, metrics={**result.metrics, PEAK: Metric(peak / 2**30, 1.0, Reduction.MAX)})

    def forward(self) -> Generator[None, Any, Any]:
        return (yield from self._around("forward"))

    def update_weights(self) -> Generator[None, Any, Any]:
        return (yield from self._around("update_weights"))

    def save(self, step: Step) -> Generator[None, Any, Any]:
        return (yield from self._around("save", step))

    def sleep(self) -> Generator[None, Any, Any]:
        return (yield from self._around("sleep"))

    def wake_up(self) -> Generator[None, Any, Any]:
        return (yield from self._around("wake_up"))

    def shutdown(self, reason: str) -> None:
        if self._cuda and self._options.on_out_of_memory:
            self._record(False)
        if self._file is not None:
            self._file.close()
            self._file = None

    # ---- inside -----------------------------------------------------------------------------------------------------

    @property
    def _chosen(self) -> bool:
        """Whether the allocations of this step are recorded."""
        return self._cuda and self._next in self._snapshots

    def _around(self, hook: str, step: Step | None = None) -> Generator[None, Any, Any]:
        if self._meter is None:
            return (yield)
        self._meter.begin()
        try:
            result = yield
        except BaseException as raised:
            with noting_failures(raised):
                self._write(hook, step, type(raised).__name__)
                if isinstance(raised, torch.OutOfMemoryError) and self._cuda and self._options.on_out_of_memory:
                    self._dump(f"{hook}-out-of-memory")
            raise
        self._write(hook, step)
        return result

    def _write(self, hook: str, step: Step | None, error: str = "") -> None:
        assert self._meter is not None
        self._peak, now = self._meter.read()
        record: dict[str, Any] = {"hook": hook}
        if step is not None:
            record |= {"optimizer_step": step.optimizer_step, "rollout_step": step.rollout_step}
        record |= {"peak_bytes": self._peak, "held_bytes": now, "of": self._meter.source, "since": self._meter.since}
        if error:
            record["error"] = error
        if self._file is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = (self._directory / f"{self._name}.jsonl").open("a", encoding="utf-8")
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def _record(self, on: bool) -> None:
        torch.cuda.memory._record_memory_history("all" if on else None, max_entries=self._options.max_entries)

    def _dump(self, what: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(self._directory / f"{self._name}-{what}.pickle"))
