"""What no CPU can show: where offloaded memory is and that its copies are waited for; compiled layers with the packed
kernel, which half precision has on a GPU alone."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch._dynamo.utils import counters

from corerl.memory import resident_bytes
from corerl.types import MemoryKind, TrainResult
from corerl_testing import (
    InProcessSender,
    Setup,
    Tensors,
    Worker,
    different,
    forward,
    make_worker,
    state_of,
    step_at,
    tiny_fields,
    train,
    weights_apart,
    whole,
)
from plugins.fsdp.tests.ragged import samples_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.processes,  # Triton's, to find CUDA
]

# Rounding alone may differ: AdamW on the host is another program, and some sums on a GPU have no fixed order.
RELATIVE = {"float32": 1e-4, "bfloat16": 5e-3, "float16": 5e-3}
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 4001}
FIELDS = {**tiny_fields("qwen3"), **SIZES}


@frozen(kw_only=True)
class Ran:
    results: list[TrainResult]  # of steps 0 to 3, between which everything sleeps once
    state: Mapping[str, Tensors]
    device_bytes: int  # allocated after step 1
    freed: Mapping[MemoryKind, int]
    resident: Mapping[str, int]  # device -> bytes of weights and moments


def start(setup: Setup, *, resume: str = "") -> Worker:
    worker = make_worker(setup, resume=resume)
    worker.config = evolve(worker.config, device="cuda")
    worker.init("127.0.0.1", 0)
    return worker


def ran(setup: Setup, directory: Path) -> Ran:
    """Steps, a sleep, more steps; a weight update and a resumed worker on the way, both checked to the last bit."""
    gc.collect()  # a worker before this one may be held by a cycle, and would leave the device meanwhile
    before = torch.cuda.memory_allocated()
    worker = start(setup)
    results = [train(worker, setup, number) for number in (0, 1)]
    backend: Any = worker.backend
    assert list(backend.tensors(MemoryKind.GRAD)) == []
    device_bytes = torch.cuda.memory_allocated() - before
    held = [
        *backend.shards.local.values(),
        *(value for state in backend.optimizer.state.values() for value in state.values()),
    ]
    resident = {kind: resident_bytes(t for t in held if t.ndim and t.device.type == kind) for kind in ("cpu", "cuda")}

    arrived: Tensors = {}
    sender = InProcessSender(
        lambda bucket: arrived.update({name: value.float().cpu().numpy() for name, value in bucket.items()})
    )
    worker.host.update_weights(sender=sender, version=1)
    state = whole([state_of(worker)])
    sent = getattr(torch, worker.manifest().dtype)
    rounded = {name: torch.tensor(value).to(sent).float().numpy() for name, value in state["master"].items()}
    assert different({"master": arrived}, {"master": rounded}, ["master"]) == []

    worker.save(str(directory / "actor"), step_at(2), False)
    freed = {kind: worker.sleep({kind}).freed_bytes for kind in MemoryKind}
    for kind in MemoryKind:
        worker.wake_up({kind})
    assert different(whole([state_of(worker)]), state) == []
    results += [train(worker, setup, number) for number in (2, 3)]
    end = whole([state_of(worker)])
    worker.shutdown("the run is over")

    resumed = start(setup, resume=str(directory / "actor"))
    assert different(whole([state_of(resumed)]), state) == []
    again = [train(resumed, setup, number) for number in (2, 3)]
    resumed.shutdown("the run is over")
    assert [result.grad_norm for result in again] == pytest.approx(
        [result.grad_norm for result in results[2:]], rel=RELATIVE[setup.train.precision]
    )
    return Ran(results=results, state=end, device_bytes=device_bytes, freed=freed, resident=resident)


@pytest.mark.parametrize("precision", list(RELATIVE))
@pytest.mark.parametrize(("offload", "kinds"), [("optimizer", {"optimizer"}), ("parameters", {"param", "optimizer"})])
def test_offloaded_memory_is_on_the_host_and_numbers_stay(
    tmp_path: Path, offload: str, kinds: set[str], precision: str
) -> None:
    eager = {"compile": False}  # the same kernels on both sides, and no minute to make them
    setup = Setup(backend="fsdp", model="", fields=FIELDS, options=eager)
    setup = evolve(setup, train=evolve(setup.train, precision=precision))
    wanted = ran(setup, tmp_path / "none")
    found = ran(evolve(setup, options={**eager, "offload": offload}), tmp_path / offload)

    relative = RELATIVE[precision]
    applied = [[result.applied for result in each.results] for each in (found, wanted)]
    assert applied[0] == applied[1]
    assert all(applied[0][precision == "float16" :])  # whose scale may begin too high
    for name in ("loss", "entropy"):
        means = [
            [run.metrics[name].total / run.metrics[name].weight for run in each.results] for each in (found, wanted)
        ]
        assert means[0] == pytest.approx(means[1], rel=relative, abs=relative)
    norms = [[result.grad_norm for result in each.results] for each in (found, wanted)]
    assert norms[0] == pytest.approx(norms[1], rel=relative)
    assert weights_apart(found.state["master"], wanted.state["master"]) < relative

    size = {"param": 1, "optimizer": 2}  # times the model's float32
    model = wanted.freed[MemoryKind.PARAM]
    assert wanted.resident == {"cpu": 0, "cuda": 3 * model}
    moved = model * sum(size[kind] for kind in kinds)
    assert found.resident == {"cpu": moved, "cuda": 3 * model - moved}
    assert wanted.device_bytes - found.device_bytes > 0.9 * moved
    for kind in (MemoryKind.PARAM, MemoryKind.OPTIMIZER):
        assert wanted.freed[kind] == size[kind] * model
        assert found.freed[kind] == (0 if kind in kinds else size[kind] * model)


# Hidden states of more than 5 Mi elements and of fewer, whose reductions Inductor would compile apart.
RAGGED = [[4096] * 6, [700, 3, 50], [2], [300] * 40, [31], [4095], [4096, 7], [64] * 300, [1023, 1], [4096] * 7]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch 2.11 asks for it while it traces
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_layers_are_compiled_once_for_each_kind_of_pass(kind: str) -> None:
    fields = {**tiny_fields(kind), **SIZES, "max_position_embeddings": 4096}
    setup = Setup(backend="fsdp", model="", fields=fields)
    setup = evolve(setup, train=evolve(setup.train, precision="bfloat16", tokens_per_micro_batch=6 * 4096))
    torch._dynamo.reset()
    norms, graphs = [], []
    for option in (False, "auto"):
        counters.clear()
        worker = start(evolve(setup, options={"compile": option}))
        for number, lengths in enumerate(RAGGED):
            norms.append(train(worker, setup, number, samples=samples_of(lengths, seed=number)).grad_norm)
            forward(worker, setup, samples_of(lengths[::-1], seed=number))
            graphs.append(counters["stats"]["unique_graphs"])
        worker.shutdown("the run is over")
    assert graphs == [0] * len(RAGGED) + [2] * len(RAGGED)
    assert norms[len(RAGGED)] == pytest.approx(norms[0], rel=RELATIVE["bfloat16"])
