"""What ranks do for the tests of this plugin beyond the shared checks."""

from __future__ import annotations

import errno
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from megatron.core import dist_checkpointing, parallel_state, utils
from megatron.core.extensions import transformer_engine as engine
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from packaging.version import Version
from torch import nn
from torch.distributed import checkpoint as torch_checkpoint

from corerl.errors import SaveFailed
from corerl.types import ForwardResult, LossSpec, MemoryKind, SampleBatch, TrainResult, offsets_of
from corerl_megatron import build, model, native
from corerl_megatron.adam import fused_adam
from corerl_megatron.backend import MegatronBackend
from corerl_megatron.layers import TorchAttention, TorchRMSNorm, engine_layers
from corerl_megatron.on_host import calling_megatron
from corerl_testing import (
    SAVED,
    BackgroundWriter,
    Setup,
    State,
    Trained,
    error_of,
    forward,
    packed_for_training,
    running,
    samples_at,
    start,
    state_of,
    step_at,
    train,
)
from corerl_testing.scenarios import halves
from plugins.megatron.tests.bridge import bridge_installed

COLUMNS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages")


def padding_after_steps(setup: Setup, steps: int) -> list[tuple[int, float]]:
    """For each vocabulary parameter with padding on this rank: its rows of padding, and the largest value in them."""
    with running(setup) as worker:
        for number in range(steps):
            train(worker, setup, number)
        found = []
        for held in worker.backend.model.held:  # type: ignore[attr-defined]
            rows = max((piece.start[0] + piece.sizes[0] for piece in held.pieces), default=0)
            padding = held.param.detach()[rows:]
            if len(padding):
                found.append((len(padding), float(padding.abs().max())))
        return found


def explained_alone(setup: Setup, alone: int) -> tuple[str, list[float]]:
    """What rank `alone` says of memory that it lacks after a step, and gradient norms of that step and the next."""
    with running(setup) as worker:
        norms, told = [train(worker, setup, 0).grad_norm], ""
        if worker.backend.layout.rank == alone:
            told = worker.backend.explained(
                "forward_backward", torch.OutOfMemoryError("CUDA out of memory. 1 MiB is free.")
            )
        norms.append(train(worker, setup, 1).grad_norm)
        return told, norms


def refused_with_balance(setup: Setup) -> str:
    """What is said of a step in several calls."""
    with running(setup) as worker:
        return error_of(lambda: halves.take_step(worker, setup, 0, announced=True))


def steps_on(setup: Setup, loss: LossSpec, steps: int) -> list[TrainResult]:
    """Train the first steps on another loss."""
    with running(setup) as worker:
        return [
            worker.train_on(batch=packed_for_training(worker, setup, samples_at(n)), loss=loss, step=step_at(n))
            for n in range(steps)
        ]


def operations(setup: Setup, batches: Sequence[Sequence[int]]) -> list[int]:
    """Of torch, in a step on samples of each of these lengths, which make one micro-batch."""
    with running(setup) as worker:
        packs = [packed_for_training(worker, setup, samples_of(lengths)) for lengths in batches]
        assert all(pack.count == 1 for pack in packs)
        for number, pack in enumerate(packs):  # the first step makes what stays, and tables for each longest sample
            worker.train_on(batch=pack, loss=setup.loss, step=step_at(number))
        return [
            operations_of(partial(worker.train_on, batch=pack, loss=setup.loss, step=step_at(number)))
            for number, pack in enumerate(packs, len(packs))
        ]


def samples_of(lengths: Sequence[int]) -> SampleBatch:
    """Samples of these lengths, of which each has a first token as its prompt."""
    draw, total = np.random.default_rng(0), sum(lengths)
    mask = np.ones(total, dtype=np.bool_)
    mask[offsets_of(np.array(lengths))[:-1]] = False
    columns = {name: np.where(mask, draw.normal(-2, 1, total), 0).astype(np.float32) for name in COLUMNS}
    return SampleBatch(
        tokens=draw.integers(3, 97, total),
        offsets=offsets_of(np.array(lengths)),
        columns={"loss_mask": mask, "versions": np.zeros(total, dtype=np.int64), **columns},
        row_columns={"group": np.zeros(len(lengths), dtype=np.int64)},
        temperature=1.0,
    )


def operations_of(call: Callable[[], object]) -> int:
    """How many of torch's operators are called meanwhile, those of the backward pass too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(each.count for each in profile.key_averages() if each.key.startswith("aten::"))


def rotary_tables(setup: Setup) -> tuple[int, int]:
    """How many are kept after a step, and asleep."""
    with running(setup) as worker:
        train(worker, setup, 0)
        kept = RotaryEmbedding.forward.cache_info().currsize
        worker.sleep(set(MemoryKind))
        return kept, RotaryEmbedding.forward.cache_info().currsize


def native_then_portable(setup: Setup, checkpoint: str) -> tuple[State, State]:
    """Masters, moments and weights as megatron-core reads them from its own format into this layout, and as CoreRL
    resumes them from its own."""
    with running(setup) as worker:
        backend = worker.backend
        assert isinstance(backend, MegatronBackend)
        for key in SAVED:  # what is not read stays apart
            for chunk in backend.local_state(key):
                with torch.no_grad():
                    chunk.view.fill_(-1.0)
        with calling_megatron(backend.device), fused_adam(), torch.no_grad():
            state = dist_checkpointing.load(
                native.sharded_state(backend.model, loading=True), f"{checkpoint}/{native.DIRECTORY}"
            )
            for index, chunk in enumerate(backend.model.chunks):
                chunk.module.load_state_dict(state[f"model{index if len(backend.model.chunks) > 1 else ''}"])
            backend.model.optimizer.load_state_dict(state["optimizer"])
        assert state["iteration"] == 2
        assert next(group["step"] for group in backend.model.optimizer.param_groups if group["params"]) == 2
        found = state_of(worker)
    with running(setup, resume=checkpoint) as worker:
        return found, state_of(worker)


def native_save_on_a_full_disk(setup: Setup, directory: str) -> str:
    """What is said of it, which may not end the process."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with running(setup) as worker:
        train(worker, setup, 0)
        backend = worker.backend
        assert isinstance(backend, MegatronBackend)
        with (
            mock.patch.object(torch_checkpoint.FileSystemWriter, "write_data", side_effect=full),
            pytest.raises(SaveFailed) as raised,
            calling_megatron(backend.device),
        ):
            native.write(backend.model, Path(directory), step_at(0))
    return raised.value.message


def saves_that_one_rank_fails(setup: Setup, directory: str, alone: int) -> list[str]:
    """What is said of saves into these directories: of the first one rank `alone` cannot write its part."""
    said = []
    with running(setup) as worker:
        train(worker, setup, 0)
        for number in range(3):
            cannot = number == 0 and torch.distributed.get_rank() == alone
            with mock.patch("corerl.backend.state.write", side_effect=SaveFailed("full")) if cannot else nullcontext():
                said.append(error_of(lambda path=f"{directory}/{number}": worker.save(path, step_at(1), False)))
    return said


def weights_left(setup: Setup) -> int:
    """How many of a model's weights are there once its worker, which has trained, has shut down."""

    def train_once() -> list[weakref.ref[Any]]:
        worker, _ = start(setup)
        train(worker, setup, 0)
        weights = [weakref.ref(weight) for module in worker.backend.model.modules for weight in module.parameters()]
        worker.shutdown("finished")
        return weights

    weights = train_once()
    assert len(weights) > 10
    for _ in range(2):  # what has a graph goes with the second
        gc.collect()
    return sum(weight() is not None for weight in weights)


def groups_left_by_a_failed_save(setup: Setup) -> tuple[str, bool, int]:
    """What shutdown says, whether megatron-core still has groups after it, and how many the backend has."""
    worker, _ = start(setup)
    with mock.patch.object(BackgroundWriter, "close", side_effect=SaveFailed("full")):
        said = error_of(lambda: worker.shutdown("finished"))
    backend: Any = worker.backend
    return said, parallel_state.model_parallel_is_initialized(), len(backend.groups.made)


@frozen(kw_only=True)
class WithOutputs:
    """Steps, and what the model gives after them."""

    trained: Trained
    outputs: ForwardResult


def steps_then_outputs(setup: Setup, steps: int, samples: SampleBatch) -> WithOutputs:
    worker, init = start(setup)
    at_start = state_of(worker)
    results = [train(worker, setup, number) for number in range(steps)]
    outputs = forward(worker, setup, samples)
    trained = Trained(
        init=init, at_start=at_start, results=results, state=state_of(worker), adam_step=worker.backend.adam_step
    )
    worker.shutdown("the test is done")
    return WithOutputs(trained=trained, outputs=outputs)


def at_start(setup: Setup) -> State:
    with running(setup) as worker:
        return state_of(worker)


def start_with_targets(setup: Setup, targets: Sequence[str]) -> None:
    """As if these tensors were those of linear layers."""
    with mock.patch.object(build, "targets_of", return_value=frozenset(targets)):
        start(setup)


Passes: TypeAlias = list[tuple[float, float]]


def steps_and_passes(setup: Setup, numbers: range) -> tuple[list[TrainResult], Passes]:
    """Optimizer steps; and for each layer of this rank how often it ran for a micro-batch, and how often its MLP, or
    the router of its experts."""
    with running(setup) as worker:
        backend = worker.backend
        assert isinstance(backend, MegatronBackend)
        layers = [layer for chunk in backend.model.chunks for layer in chunk.module.decoder.layers]
        pairs = [(layer, getattr(layer.mlp, "router", layer.mlp)) for layer in layers]
        ran: Counter[nn.Module] = Counter()
        for module in (module for pair in pairs for module in pair):
            module.register_forward_hook(lambda module, *_: ran.update([module]))
        count = sum(packed_for_training(worker, setup, samples_at(number)).count for number in numbers)
        results = [train(worker, setup, number) for number in numbers]
        return results, [(ran[layer] / count, ran[mlp] / count) for layer, mlp in pairs]


def norm_of_a_step(setup: Setup, norms: Sequence[float]) -> float:
    """The gradient norm of a step in which this rank's copy of the model has summed its number of `norms`."""
    with running(setup) as worker:
        backend = worker.backend
        assert isinstance(backend, MegatronBackend)
        own = norms[torch.distributed.get_rank()]
        with mock.patch.object(backend.model.optimizer, "get_grad_norm", return_value=own):
            return train(worker, setup, 0).grad_norm


@frozen(kw_only=True)
class Built:
    """What a rank holds and computes of a model."""

    boxes: list[Any]  # of each parameter, then of each stored buffer
    at_start: State
    outputs: ForwardResult
    results: list[TrainResult]
    state: State  # after those steps


def built(setup: Setup, samples: SampleBatch, steps: int) -> Built:
    with running(setup) as worker:
        backend = worker.backend
        assert isinstance(backend, MegatronBackend)
        split = backend.groups.tensor.size() > 1
        boxes = [
            (
                sorted(
                    (each.name, each.shape, each.offsets, each.start, each.sizes, each.axes) for each in held.pieces
                ),
                (held.expert, held.later_copy, held.duplicate, held.split if split and not held.expert else None),
            )
            for held in (*backend.model.held, *backend.model.buffers)
        ]
        at_start = state_of(worker)
        outputs = forward(worker, setup, samples)
        results = [train(worker, setup, number) for number in range(steps)]
        return Built(boxes=boxes, at_start=at_start, outputs=outputs, results=results, state=state_of(worker))


def built_by_bridge(setup: Setup, samples: SampleBatch, steps: int) -> Built:
    """By the one that plays it."""
    with bridge_installed():
        return built(evolve(setup, options={**setup.options, "bridge": True}), samples, steps)


def start_by_bridge(setup: Setup, **played: Any) -> str:
    """What is said of a model that cannot be built; see `bridge_installed`."""
    with bridge_installed(**played):
        return error_of(lambda: start(evolve(setup, options={**setup.options, "bridge": True})))


@contextmanager
def engine_specified() -> Iterator[set[str]]:
    """TransformerEngine's specification of layers beside adapters, with torch's modules in the place of its own, which
    want a GPU. Gives the names of those that were in it."""
    seen: set[str] = set()
    played: dict[str, Any] = {
        "TENorm": TorchRMSNorm,
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
        "TEDotProductAttention": TorchAttention,
        "TELayerNormColumnParallelLinear": None,
    }

    def play(submodules: Any) -> None:
        for name, value in vars(submodules).items():
            if isinstance(value, ModuleSpec):
                play(value.submodules)
            for known in (known for known in played if value is getattr(engine, known)):
                seen.add(known)
                setattr(submodules, name, played[known])

    def specified(config: TransformerConfig, *, vp_stage: int | None) -> Any:
        with (
            mock.patch.object(utils, "get_te_version", return_value=Version("2.20.0")),
            mock.patch.object(gpt_layer_specs, "HAVE_TE", True),
            mock.patch.object(gpt_layer_specs, "TENorm", engine.TENorm, create=True),
            mock.patch.object(gpt_layer_specs, "TESpecProvider", TESpecProvider, create=True),
        ):
            block = engine_layers(config, vp_stage=vp_stage, norms_apart=True)
        for layer in {id(spec): spec for spec in block.layer_specs}.values():
            play(layer.submodules)
        block.layer_norm = TorchRMSNorm
        return block

    with mock.patch.object(model, "torch_layers", specified):
        yield seen


def steps_with_engine_specified(setup: Setup, steps: int, samples: SampleBatch) -> tuple[WithOutputs, set[str]]:
    with engine_specified() as seen:
        return steps_then_outputs(setup, steps, samples), seen
