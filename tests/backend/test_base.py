"""What the base class makes of a backend's primitives, where the checks of `corerl_testing.suite` do not look."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from transformers import AutoConfig, AutoModelForCausalLM

from corerl.backend import Backend, ExtraState, StateKey, memory
from corerl.checkpoint import writer
from corerl.checkpoint.writer import BackgroundWriter
from corerl.errors import (
    CheckpointError,
    ContractError,
    HookFailed,
    ModelError,
    SaveFailed,
    WeightUpdateError,
)
from corerl.memory import storage
from corerl.memory.pool import HostMemory, Piece
from corerl.plugin.hooks import Context
from corerl.plugin.host import PluginHost
from corerl.types import GradientResult, LossSpec, MemoryKind, Output, PackedBatch
from corerl.weights.gather import GatherPlan
from corerl.weights.manifest import Bucket
from corerl_testing.harness import LOSS, Setup, role_config, step_at
from corerl_testing.inprocess import InProcessSender
from corerl_testing.plain.backend import PlainBackend
from corerl_testing.plain.spec import PlainConfig

CONTEXT = Context(role="actor", rank=0, world_size=1, local_rank=0, run_dir="")


class WithExtra(PlainBackend):
    """Has state of its own beside weights and moments."""

    def build(self, *arguments: Any) -> Any:
        self.noise, self.offset = torch.arange(3, dtype=torch.uint8), 4
        return super().build(*arguments)

    def extra_state(self) -> ExtraState:
        return {"noise": self.noise, "offset": self.offset}

    def load_extra_state(self, state: ExtraState) -> None:
        self.noise, self.offset = state["noise"], state["offset"]  # type: ignore[assignment]


def initialized(backend: Backend, setup: Setup, resume: str = "") -> Any:
    """The backend by itself: no process group, no host."""
    backend.init(evolve(role_config(setup, resume=resume), options=PlainConfig()), CONTEXT)
    return backend


@pytest.fixture
def setup(model_directories: Mapping[str, Path]) -> Setup:
    return Setup(backend="plain", model=str(model_directories["qwen3-tied"]))


def test_a_backend_without_one_of_the_primitives_cannot_be_made() -> None:
    class Incomplete(Backend):
        pass

    with pytest.raises(
        TypeError, match="after_load.*build.*forward.*forward_backward.*local_state.*optimizer_step.*tensors"
    ):
        Incomplete()  # type: ignore[abstract]


def test_a_build_without_a_layout_is_refused_before_loading(setup: Setup) -> None:
    class Forgetful(PlainBackend):
        def build(self, *arguments: Any) -> Any:
            super().build(*arguments)

        def initial_weights(self, chunks: Any) -> Any:
            raise AssertionError("nothing is to be loaded")

    host = PluginHost(Forgetful(), name="mine", context=CONTEXT)
    with pytest.raises(ContractError) as caught:
        host.init(evolve(role_config(setup), options=PlainConfig()), CONTEXT)
    assert caught.value.message == (
        "actor rank 0: init: backend:mine returned NoneType from build(), expected ParallelLayout; "
        "return this rank's layout"
    )


def test_a_backend_whose_init_found_no_model_shuts_down() -> None:
    host = PluginHost(PlainBackend(), name="plain", context=CONTEXT)
    nowhere = evolve(role_config(Setup(backend="plain", model="/nowhere")), options=PlainConfig())
    with pytest.raises(ModelError, match="must be the directory of a Hugging Face model"):
        host.init(nowhere, CONTEXT)
    host.backend.shutdown("init failed")  # called by itself, since a host that has failed only prints what goes wrong


def test_a_backend_whose_ranks_never_met_shuts_down() -> None:
    PluginHost(PlainBackend(), name="plain", context=CONTEXT).shutdown("failed")


def test_a_failed_update_frees_its_gathered_memory(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(InProcessSender):
        def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
            raise WeightUpdateError("it does not get through")

    monkeypatch.setattr(GatherPlan, "release", lambda plan: plan._kept.clear())  # as if host memory was a device's
    backend = initialized(PlainBackend(), setup)
    backend.update_weights(InProcessSender(lambda tensors: None), 1, False)
    assert backend._gather_plan._kept == {}
    with pytest.raises(WeightUpdateError):
        backend.update_weights(Broken(lambda tensors: None), 2, False)
    assert (backend._gather_plan._kept, backend.weights_version) == ({}, 1)


def test_extra_state_comes_back_to_the_same_backend_and_to_no_other(setup: Setup, tmp_path: Path) -> None:
    backend = initialized(WithExtra(), setup)
    backend.noise, backend.offset = torch.tensor([9, 8, 7], dtype=torch.uint8), 5
    backend.save(str(tmp_path), step_at(3), False)

    same = initialized(WithExtra(), setup, str(tmp_path))
    assert (same.noise.tolist(), same.offset) == ([9, 8, 7], 5)

    class Renamed(WithExtra):
        pass

    other = initialized(Renamed(), setup, str(tmp_path))
    assert (other.noise.tolist(), other.offset) == ([0, 1, 2], 4)
    assert torch.equal(next(iter(other.params.values())), next(iter(backend.params.values())))


def test_a_checkpoint_of_a_larger_model_is_refused(
    setup: Setup, model_directories: Mapping[str, Path], tmp_path: Path
) -> None:
    untied = evolve(setup, model=str(model_directories["qwen3"]))
    initialized(PlainBackend(), untied).save(str(tmp_path), step_at(0), False)
    with pytest.raises(CheckpointError) as caught:
        initialized(PlainBackend(), setup, str(tmp_path))
    assert caught.value.message == (
        f"checkpoint {tmp_path} contains 'lm_head.weight' [97, 64], which this model does not have; resume "
        "with the model that the checkpoint was written with"
    )


def test_a_background_save_that_failed_is_told_at_shutdown_at_the_latest(
    setup: Setup, host_memory: Noting, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    backend = initialized(PlainBackend(), setup)
    backend.save(str(tmp_path / "file"), step_at(0), True)
    with pytest.raises(SaveFailed, match="the background save failed: cannot write"):
        backend.shutdown("finished")
    assert host_memory.closed  # all the same
    backend.shutdown("finished")  # said once


@pytest.mark.parametrize("run_dir", ["disk", "memory"])  # a run's own directory may be in /dev/shm too
def test_an_in_memory_checkpoint_waits_for_no_other(
    run_dir: str, setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MEMORY", tmp_path / "memory")
    own = tmp_path / run_dir / "run"
    directories = own / "part", writer.memory_of(own) / "part"
    release = threading.Event()
    backend = initialized(PlainBackend(), setup)
    backend._writer = BackgroundWriter(lambda job: (release.wait(60.0), job()))
    for directory in directories:
        backend.save(str(directory), step_at(1), True)
    assert backend.saved(True, memory=True) and not backend.saved(False)
    release.set()
    assert backend.saved(True)
    files = [{each.name: each.read_bytes() for each in directory.iterdir()} for directory in directories]
    assert files[0] == files[1] and len(files[0]) == 2
    backend.shutdown("finished")


def test_after_load_follows_a_swap_in_and_out(setup: Setup) -> None:
    class Caches(PlainBackend):
        """Keeps something that is made of its weights, as a working copy is."""

        copied = 0.0

        def after_load(self, keys: Any, adam_step: int | None) -> None:
            super().after_load(keys, adam_step)
            self.copied = float(next(iter(self.params.values())).detach().flatten()[0])

    backend = initialized(Caches(), setup)
    backend.create_snapshot("old")
    old = backend.copied
    with torch.no_grad():
        next(iter(backend.params.values())).add_(1.0)
    backend.after_load({StateKey.MASTER}, None)

    def fails() -> None:
        with backend.using("old"):
            assert backend.copied == old
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert backend.copied == pytest.approx(old + 1.0)


class Noting(HostMemory):
    """Memory that would be pinned elsewhere; remembers what was reserved."""

    def __init__(self) -> None:
        self.reserved: list[int] = []
        self.closed = False

    def reserve(self, nbytes: int, group: Any = None) -> None:
        self.reserved.append(nbytes)

    def take(self, nbytes: int) -> list[Piece]:
        self.refusal = "it could not be pinned"
        return super().take(nbytes)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def host_memory(monkeypatch: pytest.MonkeyPatch) -> Noting:
    noting = Noting()
    monkeypatch.setattr(storage, "host_memory", lambda device: noting)
    return noting


def test_host_memory_is_reserved_for_what_will_sleep(setup: Setup, host_memory: Noting) -> None:
    def started(*sleeps: str) -> Backend:
        backend = PlainBackend()
        backend.init(evolve(role_config(setup), options=PlainConfig(), sleeps=sleeps), CONTEXT)
        return backend

    started()
    assert host_memory.reserved == []
    backend = started("param", "grad", "optimizer")
    weights = sum(param.nbytes for param in backend.tensors(MemoryKind.PARAM))
    assert backend.sleeping_bytes() == 3 * weights  # moments are as large as float32 weights, each
    assert 3 * weights < host_memory.reserved[0] < 3.01 * weights + 2**25
    for kind, times in (("param", 1), ("optimizer", 2), ("grad", 0)):
        started(kind)
        assert times * weights <= host_memory.reserved[-1] < 1.01 * times * weights + 2**25
    assert backend.sleeping_bytes([MemoryKind.PARAM, MemoryKind.GRAD]) == weights
    backend.local_state(StateKey.EXP_AVG)  # makes them
    assert backend.moments_to_come() == 0 and backend.sleeping_bytes() >= 3 * weights
    assert not host_memory.closed
    backend.shutdown("finished")
    assert host_memory.closed


TORCHS = (
    "CUDA out of memory. Tried to allocate 86.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 86.69 MiB is "
    "free. Including non-PyTorch memory, this process has 138.24 GiB memory in use. Of the allocated memory 135.26 GiB "
    "is allocated by PyTorch, and 1.05 GiB is reserved by PyTorch but unallocated."
)


class Large(PlainBackend):
    """Wants more than the device has, once it is built or before."""

    early = False

    def build(self, *arguments: Any) -> Any:
        if self.early:
            raise torch.OutOfMemoryError(TORCHS)
        return super().build(*arguments)

    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        raise torch.OutOfMemoryError(TORCHS)


def host_of(backend: Backend) -> PluginHost:
    return PluginHost(backend, name="large", context=CONTEXT)


def test_out_of_memory_says_what_holds_the_memory(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(setup.model))
    gib = 4 * sum(param.numel() for param in model.parameters()) / 2**30
    host = host_of(Large())
    host.init(evolve(role_config(setup), options=PlainConfig()), CONTEXT)
    own, others = memory.held_on, 80 * 2**30
    monkeypatch.setattr(memory, "held_on", lambda *of: evolve(found := own(*of), used=found.used + others))
    with pytest.raises(HookFailed) as caught:
        host.forward_backward(PackedBatch(micro_batches=(), count=1), LOSS, (), True, at=step_at(3))
    assert caught.value.message == (
        "backend:large, actor rank 0: forward_backward failed at optimizer step 3: OutOfMemoryError: CUDA out of "
        "memory. Tried to allocate 86.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 86.69 MiB is free; in "
        f"use: tensors of param: {gib:.3g} GiB; other processes: 80 GiB; to need less, lower "
        "train.tokens_per_micro_batch, set train.recompute = 'full', split the model over more ranks, or give the "
        "engines less of the device"
    )


def test_a_half_built_backend_shows_torchs_own_words(setup: Setup) -> None:
    backend = Large()
    backend.early = True
    with pytest.raises(HookFailed) as caught:
        host_of(backend).init(evolve(role_config(setup), options=PlainConfig()), CONTEXT)
    line = f"tests/backend/test_base.py:{Large.build.__code__.co_firstlineno + 2}"
    assert caught.value.message == f"backend:large, actor rank 0: init failed: OutOfMemoryError: {TORCHS} ({line})"
