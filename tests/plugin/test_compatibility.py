"""Plugins that were written for another core: what is less or more in a compatible way runs, another API is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from corerl.config.schema import ModelConfig, RoleConfig, TrainConfig, WeightsConfig
from corerl.plugin.hooks import Context
from corerl.plugin.host import PluginHost, State
from corerl.plugin.registry import Kind, Status, installed, load, load_implementation
from corerl.types import LossSpec, MemoryKind, PackedBatch, Step

Install = Callable[..., Path]

CONTEXT = Context(role="actor", rank=0, world_size=1, local_rank=0, run_dir="")
CONFIG = RoleConfig(
    model=ModelConfig(),
    train=TrainConfig(),
    options=None,
    weights=WeightsConfig(),
    device="cpu",
    seed=0,
    timeout=1.0,
)
CODE = """
import numpy as np
from corerl.plugin.host import BackendBase
from corerl.types import (
    ForwardResult, GradientResult, InitResult, ParallelLayout, SaveResult, SleepResult, StepResult, UpdateResult,
    WakeResult,
)

class Code(BackendBase):
    def init({init}):
        return InitResult(layout=ParallelLayout(rank=0, world_size=1, dp_rank=0, dp_size=1))

    def forward_backward({forward_backward}):
        return GradientResult(metrics={{}}, tokens=batch.count)

    def optimizer_step({optimizer_step}):
        return StepResult(applied=True, grad_norm={grad_norm})

    def forward({forward}):
        return ForwardResult(samples=np.zeros(0, np.int64), offsets=np.zeros(1, np.int64), outputs={{}})

    def update_weights(self, version):
        return UpdateResult(version=version, bytes=0, seconds=0.0)

    def save(self, path):
        return SaveResult(path=path, bytes=0, complete=True)

    def sleep(self):
        return SleepResult(freed_bytes=1, residual_bytes=0)

    def wake_up(self):
        return WakeResult(restored_bytes=1)
"""
FEWER = CODE.format(
    init="self", forward_backward="self, batch", optimizer_step="self", forward="self, batch", grad_norm="0.5"
)
MORE = CODE.format(
    init="self, config, context, topology=None",
    forward_backward="self, batch, loss, outputs, last, deadline=None",  # of a later minor version of the contract
    optimizer_step="self, step, scale, deadline=7.5",
    forward="self, batch, outputs, weights, dtype=None",
    grad_norm="deadline",
)


@pytest.mark.parametrize(("module", "code", "grad_norm"), [("fewer", FEWER, 0.5), ("more", MORE, 7.5)])
def test_a_backend_with_fewer_or_defaulted_arguments_runs(
    module: str, code: str, grad_norm: float, install: Install, backend_spec: str
) -> None:
    modules = {f"{module}_compat": backend_spec, f"{module}_compat_code": code}
    install("corerl-other", {"backends": {"other": f"{module}_compat:SPEC"}}, **modules)
    loaded = load(Kind.BACKENDS, "other")
    host = PluginHost(load_implementation(Kind.BACKENDS, loaded)(), name="other", context=CONTEXT)
    assert host.init(config=CONFIG, context=CONTEXT).layout.dp_size == 1
    batch = PackedBatch(micro_batches=(), count=3)
    step = Step(optimizer_step=0, rollout_step=0, lr=0.1)
    assert host.forward_backward(batch=batch, loss=LossSpec(name="clipped"), outputs=(), last=True).tokens == 3
    assert host.optimizer_step(step=step, scale=1.0).grad_norm == grad_norm
    assert host.forward(batch=batch, outputs=(), weights="").outputs == {}
    assert host.update_weights(sender=None, version=1).version == 1
    assert host.save(path="there", step=step, background=False).path == "there"
    assert host.sleep(kinds=frozenset(MemoryKind)).freed_bytes == 1
    assert host.wake_up(kinds=frozenset(MemoryKind)).restored_bytes == 1
    assert host.state is State.READY


@pytest.mark.parametrize("api", ["'1.0'", "(1,)", "None"])
def test_an_api_that_is_no_pair_of_numbers_is_broken(api: str, install: Install, backend_spec: str) -> None:
    install("corerl-other", {"backends": {"other": "pairless:SPEC"}}, pairless=backend_spec.replace("(2, 0)", api))
    (other,) = [each for each in installed(Kind.BACKENDS) if each.name == "other"]
    assert other.status is Status.BROKEN
    assert other.reason.endswith(f"pairless:SPEC has api={api}, expected (major, minor)")
