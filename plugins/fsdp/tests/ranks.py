"""What ranks do for the tests of this plugin beyond the shared checks, and backends with one fault each."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import evolve

from corerl.memory.storage import resident_bytes
from corerl.plugin.spec import BackendSpec
from corerl.testing.allocations import Allocations
from corerl.testing.harness import Setup, forward, running, samples_at, train
from corerl.types import MemoryKind, UpdateResult
from corerl.weights.chunks import TensorSource
from corerl.weights.transport import WeightSender
from corerl_fsdp import SPEC
from corerl_fsdp.backend import FsdpBackend


class LoadsTheWholeModel(FsdpBackend):
    """As loaders do that read a checkpoint on each rank and shard it then."""

    spec: ClassVar[BackendSpec] = evolve(SPEC, implementation=f"{__name__}:LoadsTheWholeModel")

    def initial_weights(self) -> TensorSource:
        whole = {name: torch.empty(param.shape) for name, param in self.shards.dtensors.items()}
        source = super().initial_weights()
        del whole
        return source


class GathersTheWholeModel(FsdpBackend):
    """As updates do that ask for a full state dict."""

    spec: ClassVar[BackendSpec] = evolve(SPEC, implementation=f"{__name__}:GathersTheWholeModel")

    def update_weights(self, sender: WeightSender, version: int) -> UpdateResult:
        whole = [param.detach().full_tensor() for param in self.shards.dtensors.values()]
        result = super().update_weights(sender, version)
        del whole
        return result


def held_after_passes(setup: Setup) -> list[int]:
    """Bytes that a pass without gradients leaves behind, and then a step, its moments apart."""
    with running(setup) as worker, Allocations() as found:
        forward(worker, setup, samples_at(0))
        after_forward = found.held
        train(worker, setup, 0)
        return [after_forward, found.held - resident_bytes(worker.backend.tensors(MemoryKind.OPTIMIZER))]
