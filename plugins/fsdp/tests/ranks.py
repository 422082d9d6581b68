"""What ranks do for the tests of this plugin beyond the shared checks, and backends with one fault each."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, TypeVar
from unittest import mock

import numpy as np
import pytest
import torch
from attrs import evolve
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from corerl.errors import HookFailed
from corerl.memory import resident_bytes
from corerl.plugin import BackendSpec
from corerl.types import Array, MemoryKind, Output, TrainResult, UpdateResult
from corerl.weights import Chunk, TensorSource, WeightSender, is_adapter
from corerl_fsdp import SPEC
from corerl_fsdp.backend import FsdpBackend
from corerl_testing import (
    Allocations,
    InProcessSender,
    Setup,
    forward,
    packed_for_training,
    running,
    samples_at,
    step_at,
    train,
)

T = TypeVar("T")
KINDS = list(MemoryKind)


class LoadsTheWholeModel(FsdpBackend):
    """As loaders do that read a checkpoint on each rank and shard it then."""

    spec: ClassVar[BackendSpec] = evolve(SPEC, implementation=f"{__name__}:LoadsTheWholeModel")

    def initial_weights(self, chunks: Sequence[Chunk]) -> TensorSource:
        whole = {name: torch.empty(param.shape) for name, param in self.shards.dtensors.items()}
        source = super().initial_weights(chunks)
        del whole
        return source


class GathersTheWholeModel(FsdpBackend):
    """As updates do that ask for a full state dict."""

    spec: ClassVar[BackendSpec] = evolve(SPEC, implementation=f"{__name__}:GathersTheWholeModel")

    def update_weights(self, sender: WeightSender, version: int, adapters: bool) -> UpdateResult:
        whole = [param.detach().full_tensor() for param in self.shards.dtensors.values()]
        result = super().update_weights(sender, version, adapters)
        del whole
        return result


def rotary_dtypes(setup: Setup) -> set[torch.dtype]:
    """Of the tables that a layer's attention is handed."""
    found: set[torch.dtype] = set()

    def note(module: Any, args: Any, kwargs: Any) -> None:
        found.update(table.dtype for table in kwargs["position_embeddings"])

    with running(setup) as worker:
        layer = worker.backend.policy.model.get_decoder().layers[0]  # type: ignore[attr-defined]
        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
        forward(worker, setup, samples_at(0))
    return found


def held_after_passes(setup: Setup) -> list[int]:
    """Bytes that a pass without gradients leaves behind, and then a step, its moments apart."""
    with running(setup) as worker, Allocations() as found:
        forward(worker, setup, samples_at(0))
        after_forward = _left(found, 0)
        train(worker, setup, 0)
        moments = resident_bytes(worker.backend.tensors(MemoryKind.OPTIMIZER))
        return [after_forward, _left(found, moments) - moments]


def after_a_pass(setup: Setup, raises: bool) -> tuple[Array, int]:
    """Log-probs under the weights that a step has left, after a pass under those before it that ends well or `raises`
    in a layer; and how many passes through units torch has noted then."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with running(setup) as worker:
        worker.create_snapshot("before")
        train(worker, setup, 0)
        policy = worker.backend.policy  # type: ignore[attr-defined]
        hook = policy.model.get_decoder().layers[-1].register_forward_pre_hook(fail) if raises else None
        with pytest.raises(HookFailed, match="ZeroDivisionError") if hook else nullcontext():
            forward(worker, setup, samples_at(1), snapshot="before")
        if hook:
            hook.remove()
        found = forward(worker, setup, samples_at(1)).outputs[Output.LOGPROBS]
        return found, len(policy._get_fsdp_state()._comm_ctx.post_forward_order)


def largest_of_an_update(setup: Setup) -> tuple[int, int]:
    """Bytes of the largest storage that an update from rank 0 makes here, and of this rank's part of the adapters."""
    with running(setup) as worker:
        adapters = [each.view for each in worker.backend.weights if is_adapter(each.name)]
        with Allocations() as found:
            worker.host.update_weights(InProcessSender(lambda tensors: None), 1)
        return found.largest, sum(view.nbytes for view in adapters)


def _left(found: Allocations, wanted: int) -> int:
    """Bytes that are held once gloo's threads have let go of what they gathered, a moment after it has arrived."""
    until = time.monotonic() + 5.0
    while found.held > wanted and time.monotonic() < until:
        time.sleep(0.01)
    return found.held


# ---- options ---------------------------------------------------------------------------------------------------------


def saved_for_backward(setup: Setup) -> int:
    """Tensors that the forward passes of one step keep outside of the layers that are recomputed."""
    kept = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += 1
        return tensor

    with running(setup) as worker, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        train(worker, setup, 0)
    return kept


class Collectives(TorchDispatchMode):
    """How often each operation on a process group runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the local tensors
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(setup: Setup) -> tuple[int, int, Counter[str]]:
    """Units that the model is sharded in, micro-batches of one step, and collectives of that step."""
    with running(setup) as worker:
        train(worker, setup, 0)  # what FSDP does once
        units = sum(isinstance(module, FSDPModule) for module in worker.backend.policy.modules())
        micro_batches = len(list(packed_for_training(worker, setup, samples_at(1)).micro_batches))
        with Collectives() as found:
            train(worker, setup, 1)
        return units, micro_batches, found.counts


class CopiesToThemselves(TorchDispatchMode):
    """How many tensors are asked to copy themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func is torch.ops.aten.copy_.default and args[0] is args[1]:
            self.count += 1
        return func(*args, **(kwargs or {}))


def reductions_in_one_buffer(setup: Setup) -> tuple[int, int]:
    """Reductions of a step, and how many of them had one buffer for their input and output."""
    with running(setup) as worker:
        train(worker, setup, 0)
        units = sum(isinstance(module, FSDPModule) for module in worker.backend.policy.modules())
        micro_batches = len(list(packed_for_training(worker, setup, samples_at(1)).micro_batches))
        with CopiesToThemselves() as found:
            train(worker, setup, 1)
        return units * micro_batches, found.count


def reductions_of_two_calls(setup: Setup) -> tuple[int, list[int], list[int]]:
    """On one rank: units, and of each of two calls that add gradients to one step its micro-batches and reductions."""
    with running(setup) as worker:
        units = sum(isinstance(module, FSDPModule) for module in worker.backend.policy.modules())
        micro_batches, reductions = [], []
        for batch in (packed_for_training(worker, setup, samples_at(number)) for number in range(2)):
            micro_batches.append(batch.count)
            with CopiesToThemselves() as found:
                worker.add_gradients(batch, setup.loss, last=False)
            reductions.append(found.count)
        return units, micro_batches, reductions


def with_two_buffers(scenario: Callable[..., T], *arguments: Any) -> T:
    """Go through a scenario with torch's own reductions on one rank."""
    with mock.patch.object(FSDPModule, "set_custom_reduce_scatter"):
        return scenario(*arguments)


def traced(scenario: Callable[..., T], *arguments: Any) -> T:
    """Go through a scenario. Where layers are compiled, the graphs are made and run as they are."""
    with (
        mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")),
        warnings.catch_warnings(action="ignore"),  # torch's own, of the gradients that it looks at as it traces
    ):
        found = scenario(*arguments)
    torch._dynamo.reset()
    return found


def step_of_a_resumed_run(setup: Setup, directory: str, number: int) -> TrainResult:
    with running(setup, resume=directory) as worker:
        return train(worker, setup, number)


def overflow_and_go_on(setup: Setup, directory: str, resume: bool) -> list[TrainResult]:
    """Step 0, step 1 on advantages that float16 cannot hold the gradients of, steps 2 and 3; saved and resumed by
    another worker before step 2 where asked."""
    results = []
    with running(setup) as worker:
        results.append(train(worker, setup, 0))
        samples = samples_at(1)
        huge = samples.columns["advantages"] * np.float32(1e6)
        results.append(train(worker, setup, 1, samples=samples.with_columns(advantages=huge)))
        if not resume:
            return [*results, train(worker, setup, 2), train(worker, setup, 3)]
        worker.save(directory, step_at(2), False)
    torch.distributed.barrier()  # every rank has written before any reads
    with running(setup, resume=directory) as worker:
        return [*results, train(worker, setup, 2), train(worker, setup, 3)]
