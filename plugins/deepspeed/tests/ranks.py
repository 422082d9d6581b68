"""What ranks do for the tests of this plugin beyond the shared checks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from deepspeed import comm
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from corerl.memory import resident_bytes
from corerl.types import MemoryKind, MicroBatch, PackedBatch
from corerl_deepspeed import state
from corerl_deepspeed.gradients import GradientWatch
from corerl_testing import (
    Allocations,
    Setup,
    error_of,
    forward,
    packed_for_training,
    running,
    samples_at,
    start,
    step_at,
    train,
)
from corerl_testing.scenarios import training


def held_after_passes(setup: Setup) -> list[int]:
    """Bytes that a pass without gradients leaves behind, and then a step, its moments apart."""
    with running(setup) as worker, Allocations() as found:
        forward(worker, setup, samples_at(0))
        after_forward = found.held
        train(worker, setup, 0)
        return [after_forward, found.held - resident_bytes(worker.backend.tensors(MemoryKind.OPTIMIZER))]


def offloaded(setup: Setup) -> Mapping[str, bool]:
    """What DeepSpeed itself says of where its memory is, and of second copies after a pass."""
    with running(setup) as worker:
        train(worker, setup, 0)
        forward(worker, setup, samples_at(0))
        model = worker.backend.model  # type: ignore[attr-defined]
        engine = model.engine
        return {
            "optimizer": bool(engine.zero_cpu_offload()),
            "parameters": bool(engine.zero_offload_param() and engine.zero_offload_param().device == "cpu"),
            "second copies": any(
                getattr(param, "ds_secondary_tensor", None) is not None for param in model.policy.parameters()
            ),
        }


@frozen(kw_only=True)
class Settings:
    """What an engine says of them, and a step with them."""

    groups: int  # tensors that AdamW steps
    max_live_parameters: int
    memory_breakdown: bool
    grad_norm: float


def engine_settings(setup: Setup) -> Settings:
    with running(setup) as worker:
        norm = train(worker, setup, 0).grad_norm
        model = worker.backend.model  # type: ignore[attr-defined]
        return Settings(
            groups=len(state.flats(model)),
            max_live_parameters=model.engine.zero_max_live_parameters(),
            memory_breakdown=model.engine.memory_breakdown(),
            grad_norm=norm,
        )


@frozen(kw_only=True)
class Left:
    """Of a model that has ended, and process groups more than there were before it was built."""

    modules: int  # that DeepSpeed keeps
    policy: bool
    groups: int
    groups_meanwhile: int


def left_behind(setup: Setup) -> Left:
    before = _groups()
    entered = len(parameter_offload.FWD_MODULE_STACK)  # and never left, where a pass has failed in this process
    with running(setup) as worker:
        for number in (0, 1):  # from the second step on DeepSpeed knows what comes next, and keeps that
            train(worker, setup, number)
        forward(worker, setup, samples_at(0))
        policy: Any = weakref.ref(worker.backend.model.policy)  # type: ignore[attr-defined]
        meanwhile = _groups()
    del worker
    gc.collect()
    return Left(
        modules=len(parameter_offload.FWD_MODULE_STACK) - entered,
        policy=policy() is not None,
        groups=_groups() - before,
        groups_meanwhile=meanwhile - before,
    )


def after_a_save_that_failed(setup: Setup, file: str) -> tuple[str, bool, bool]:
    """What is said as a worker ends; whether its model is left, and whether DeepSpeed still has its process group."""
    worker, _ = start(setup)
    train(worker, setup, 0)
    worker.save(file, step_at(1), True)
    policy: Any = weakref.ref(worker.backend.model.policy)  # type: ignore[attr-defined]
    said = error_of(partial(worker.shutdown, "finished"))
    del worker
    gc.collect()
    return said, policy() is not None, comm.comm.cdb is not None


def _groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def gathers(setup: Setup) -> list[list[tuple[bool, frozenset[int]]]]:
    """Of each of five steps, before the last two of which all sleeps: in a forward pass or not, which parameters."""
    found: list[list[tuple[bool, frozenset[int]]]] = []
    hidden = "_PartitionedParameterCoordinator__all_gather_params_"
    gather = getattr(PartitionedParameterCoordinator, hidden)

    def noted(self: Any, params: Any, forward: bool, quantize: bool = False) -> None:
        missing = frozenset(param.ds_id for param in params if param.ds_status is ZeroParamStatus.NOT_AVAILABLE)
        found[-1].append((forward, missing))
        gather(self, params, forward, quantize)

    with mock.patch.object(PartitionedParameterCoordinator, hidden, noted), running(setup) as worker:
        for number in range(5):
            if number == 3:
                worker.sleep(frozenset(MemoryKind))
                worker.wake_up(frozenset(MemoryKind))
            found.append([])
            train(worker, setup, 0)  # the same samples in each
    return found


class Dropped(Allocations):
    """And of each storage that is gone again, its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[int] = []

    def _count(self, storage: torch.UntypedStorage) -> None:
        known = self._live.get(storage._cdata)
        if known is None or known() is not storage:
            weakref.finalize(storage, self.dropped.append, storage.nbytes())
        super()._count(storage)


def largest_dropped(setup: Setup) -> tuple[int, int]:
    """While a model is built: bytes of the largest storage that is gone at the end, and of its largest flat one."""
    with Dropped() as found, running(setup) as worker:
        flats = list(worker.backend.tensors(MemoryKind.MASTER))
        return max(found.dropped), max(resident_bytes([flat]) for flat in flats)


@frozen(kw_only=True)
class Skip:
    """The second layer has no part in some micro-batches of a step, as with layer drop."""

    step: int
    micro_batches: tuple[int, ...]  # -1 is the last one


def train_and_skip(setup: Setup, skip: Skip, *, apart: bool = False, watched: bool = True) -> list[tuple[float, float]]:
    """(loss, gradient norm) of three steps; `apart`: each micro-batch comes in a call of its own."""
    skipping = False
    whole = Qwen3DecoderLayer.forward

    def forward(layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if skipping and layer.self_attn.layer_idx == 1:
            return hidden
        found: torch.Tensor = whole(layer, hidden, *args, **kwargs)
        return found

    def drawn(batch: PackedBatch, number: int) -> Iterator[MicroBatch]:
        nonlocal skipping
        for at, micro in enumerate(batch.micro_batches):
            skipping = number == skip.step and not {at, at - batch.count}.isdisjoint(skip.micro_batches)
            yield micro

    found = []
    watch = nullcontext() if watched else mock.patch.object(GradientWatch, "check")
    with mock.patch.object(Qwen3DecoderLayer, "forward", forward), watch, running(setup) as worker:
        for number in range(3):
            batch = packed_for_training(worker, setup, samples_at(number))
            assert batch.count > 1
            if apart:
                for micro in drawn(batch, number):
                    alone = evolve(batch, micro_batches=[micro], count=1)
                    worker.add_gradients(alone, setup.loss, last=False)
                result = worker.optimizer_step(step_at(number), 1.0)
            else:
                lazy = evolve(batch, micro_batches=drawn(batch, number))
                result = worker.train_on(batch=lazy, loss=setup.loss, step=step_at(number))
            found.append((result.metrics["loss"].value, result.grad_norm))
    return found


def skip_and_keep(setup: Setup) -> float:
    """The gradient's norm in a step after one that was skipped, if nothing but DeepSpeed drops the latter's."""
    with mock.patch("corerl_deepspeed.step.drop_skipped_gradients"):
        return training.skip_a_step(setup).then.grad_norm


def norms_before_stepping(setup: Setup) -> list[tuple[float, float]]:
    """Of three steps: the gradient's norm, and that of what AdamW would read when DeepSpeed is told to step."""
    with running(setup) as worker:
        model = worker.backend.model  # type: ignore[attr-defined]
        step, there = model.engine.step, list[float]()

        def noted() -> None:
            there.append(float(torch.cat([flat.grad for flat in state.flats(model)]).norm()))
            step()

        with mock.patch.object(model.engine, "step", noted):
            norms = [train(worker, setup, number).grad_norm for number in range(3)]
    return list(zip(norms, there, strict=True))


def start_with_copies(setup: Setup) -> None:
    """As DeepSpeed starts by itself: it sends parameters that hold nothing, and copies them together."""
    with mock.patch("corerl_deepspeed.build.nothing_to_copy", nullcontext), running(setup):
        pass
