"""Find where a number that is not finite first appears: in which column, sample and token, metric or parameter, on
which rank and at which step."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

import numpy as np
import torch
from attrs import evolve

from corerl.config import RoleConfig
from corerl.errors import HookFailed
from corerl.plugin import Context
from corerl.types import (
    Array,
    ForwardResult,
    GradientResult,
    InitResult,
    IntArray,
    Metric,
    PackedBatch,
    Reduction,
    Step,
    StepResult,
)
from corerl_observe.errors import noting_failures
from corerl_observe.specs import NanGuardOptions

FINDINGS_DIR = "nan-guard"
FOUND = "nonfinite"  # the metric: number of findings on all ranks


class NanGuard:
    """Wraps the halves of a step, and `forward`. Of a step it raises only once that is taken, even for a finding in the
    inputs: if one rank raised earlier, the others would wait for it in a collective."""

    def __init__(self, *, options: NanGuardOptions, run_dir: str) -> None:
        self._options = options
        self._directory = Path(run_dir) / FINDINGS_DIR
        self._context: Context | None = None
        self._scales_loss = False  # with a loss scale, the backend skips a step now and then on purpose
        self._models: list[torch.nn.Module] = []  # the outermost, once they were called in a step
        self._knows_tower = False  # a step that shows pictures was watched: before that, a tower need not be called
        self._found: list[str] = []  # in this step so far

    def init(self, config: RoleConfig, context: Context) -> Generator[None, InitResult, InitResult]:
        self._context = context
        self._scales_loss = config.train.precision == "float16"
        return (yield)

    def forward_backward(self, batch: PackedBatch) -> Generator[None, GradientResult, GradientResult]:
        if self._options.inputs:
            self._found += in_columns(batch)
        watching = None
        if self._options.parameters and (not self._models or (batch.pictures and not self._knows_tower)):
            watching = self._watch_for_models()
            self._knows_tower = bool(batch.pictures)
        try:
            result = yield
        except BaseException as raised:
            with noting_failures(raised):
                self._tell("forward_backward", self._found)  # these may be the cause
            raise
        finally:
            if watching is not None:
                watching.remove()
        self._found += in_metrics(result.metrics)
        return result

    def optimizer_step(self, step: Step) -> Generator[None, StepResult, StepResult]:
        found, self._found = self._found, []
        try:
            result = yield
        except BaseException as raised:
            with noting_failures(raised):
                self._tell("optimizer_step", found, step)
            raise
        found += [*in_metrics(result.metrics), *in_norm(result, scales_loss=self._scales_loss)]
        for model in self._models:
            found += in_parameters(model)
        self._tell("optimizer_step", found, step)
        if found and self._options.action == "raise":
            raise self._error("optimizer_step", found)
        return evolve(result, metrics={**result.metrics, FOUND: Metric(float(len(found)), 1.0, Reduction.SUM)})

    def forward(self) -> Generator[None, ForwardResult, ForwardResult]:
        result = yield
        found = [
            f"output {output}: {text}"
            for output, values in result.outputs.items()
            if (text := _first(values, result.rows, result.offsets))
        ]
        self._tell("forward", found)
        if found and self._options.action == "raise":
            raise self._error("forward", found)
        return result

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _error(self, hook: str, found: list[str]) -> HookFailed:
        more = f"; {len(found) - 1} more in {self._path}" if len(found) > 1 else ""
        failed = HookFailed(f"extension:nan-guard found a non-finite number: {found[0]}{more}")
        failed.hook, failed.rank = hook, self._rank
        return failed

    def _tell(self, hook: str, found: list[str], step: Step | None = None) -> None:
        """Write the findings to the rank's file and to standard error."""
        if not found:
            return
        at = {"optimizer_step": step.optimizer_step, "rollout_step": step.rollout_step} if step else {}
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            for text in found:
                file.write(json.dumps({"hook": hook, **at, "found": text}) + "\n")
                print(f"nan-guard: {self._path.stem}: {hook}: {text}", file=sys.stderr)

    @property
    def _rank(self) -> int:
        return self._context.rank if self._context else -1

    @property
    def _path(self) -> Path:
        role = self._context.role if self._context else "role"
        return self._directory / f"{role}-{self._rank}.jsonl"

    def _watch_for_models(self) -> torch.utils.hooks.RemovableHandle:
        """Find the modules that are called in a step, which backends do not expose: the model, and before it the tower
        of one that reads pictures. Those inside another one are not kept."""
        inside = {module for model in self._models for module in model.modules()}

        def seen(module: torch.nn.Module, inputs: object) -> None:
            if module not in inside and any(True for _ in module.parameters()):
                self._models.append(module)
                inside.update(module.modules())

        return torch.nn.modules.module.register_module_forward_pre_hook(seen)


def in_columns(batch: PackedBatch) -> list[str]:
    """The first number in each column that is not finite. A batch that can be iterated only once is not checked."""
    # Unwrap the batch of a traced run, which would time this pass too.
    micro_batches = getattr(batch.micro_batches, "micro_batches", batch.micro_batches)
    if iter(micro_batches) is micro_batches:
        return []
    found: dict[str, str] = {}
    for micro in micro_batches:
        for name, column in micro.columns.items():
            if name not in found and (text := _first(column, micro.rows, micro.cu_seqlens)):
                found[name] = f"column {name}: {text}"
    return list(found.values())


def in_metrics(metrics: Mapping[str, Metric]) -> list[str]:
    """Metrics that are not finite."""
    return [f"metric {name}: {metric.total}" for name, metric in metrics.items() if not math.isfinite(metric.total)]


def in_norm(result: StepResult, *, scales_loss: bool) -> list[str]:
    """A gradient norm that is not finite. With `scales_loss`, that of a skipped step may be: so the loss scale is
    found."""
    if math.isfinite(result.grad_norm) or (scales_loss and not result.applied):
        return []
    done = "applied anyway" if result.applied else "skipped"
    return [f"gradient norm: {result.grad_norm}; the step was {done}"]


def in_parameters(model: torch.nn.Module) -> list[str]:
    """The first parameter whose part on this rank is not finite. No collective."""
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        local = values.to_local() if hasattr(values, "to_local") else values
        if local.numel() and not torch.isfinite(local).all().item():
            bad = int((~torch.isfinite(local)).sum().item())
            return [f"parameter {name}: {bad} of the {local.numel()} values on this rank"]
    return []


def _first(values: Array, samples: IntArray, offsets: IntArray) -> str:
    """Where the first number that is not finite is, and how many tokens have one; "" if all are finite."""
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return ""
    wrong = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
    at = int(wrong[0])
    sequence = int(np.searchsorted(offsets, at, side="right")) - 1
    number = values[at].ravel()[~np.isfinite(values[at].ravel())][0]
    where = f"sample {samples[sequence]}, token {at - int(offsets[sequence])}"
    return f"{number} at {where}" + (f", and at {len(wrong) - 1} more tokens" if len(wrong) > 1 else "")
