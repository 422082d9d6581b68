"""Put memory to sleep and wake it up, and note what is refused meanwhile; and what a role of adapters holds."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import torch
from attrs import field, frozen
from torch._subclasses import FakeTensor

from corerl.backend import StateKey
from corerl.config import ClusterInfo
from corerl.memory import resident_bytes
from corerl.models import hf_config, meta_model, size_of
from corerl.plugin import Kind, load
from corerl.trainer.worker import Worker
from corerl.types import (
    MemoryKind,
    SleepResult,
    TrainResult,
    WakeResult,
)
from corerl.weights import is_adapter
from corerl_testing.harness import (
    Setup,
    State,
    error_of,
    forward,
    make_samples,
    running,
    samples_at,
    state_of,
    step_at,
    train,
)
from corerl_testing.inprocess import InProcessSender


@frozen(kw_only=True)
class Slept:
    expected_bytes: int  # host memory that full sleep would take, as the rank said before its first step
    before: State
    state_bytes: int  # bytes of the storages of weights and moments, while awake
    state_bytes_asleep: int
    resident: Mapping[MemoryKind, int]  # bytes of each kind's storages while awake
    alive: int  # bytes of all storages in the process while awake
    alive_asleep: int  # the same while asleep, including the host copies
    gradients_asleep: int  # bytes of what `.grad` of any tensor holds then, beyond what was there before the backend
    sleeps: Sequence[SleepResult]
    resident_asleep: Sequence[int]  # bytes of each kind's storages, right after it was put to sleep
    again: SleepResult  # of sleeping once more
    refused: Mapping[str, str]  # verb -> error while everything sleeps
    wakes: Sequence[WakeResult]
    after: State
    then: list[TrainResult] = field(factory=list)
    end: State


def sleep_and_wake(setup: Setup, down: Sequence[MemoryKind], up: Sequence[MemoryKind], directory: str) -> Slept:
    """Train steps 0 and 1, put every kind to sleep and wake it up in the given orders, then train steps 2 and 3."""
    others = gradients()  # of what this process did before
    with running(setup) as worker:
        expected_bytes = worker.backend.sleeping_bytes()
        for number in (0, 1):
            train(worker, setup, number)
        before = state_of(worker)
        views = [chunk.view for key in StateKey for chunk in worker.backend.local_state(key)]
        state_bytes = resident_bytes(views)
        awake, living = {kind: resident(worker, kind) for kind in MemoryKind}, alive()
        sleeps, asleep = [], []
        for kind in down:
            sleeps.append(worker.sleep({kind}))
            asleep.append(resident(worker, kind))
        state_bytes_asleep, alive_asleep, gradients_asleep = (
            resident_bytes(views),
            alive(),
            max(0, gradients() - others),
        )
        again = worker.sleep(frozenset(MemoryKind))
        refused = {
            "forward_backward": error_of(lambda: train(worker, setup, 2)),
            "forward": error_of(lambda: forward(worker, setup, samples_at(0))),
            "update_weights": error_of(
                lambda: worker.host.update_weights(InProcessSender(lambda bucket: None), version=1)
            ),
            "save": error_of(lambda: worker.save(directory, step_at(2), False)),
        }
        wakes = [worker.wake_up({kind}) for kind in up]
        after = state_of(worker)
        then = [train(worker, setup, number) for number in (2, 3)]
        return Slept(
            expected_bytes=expected_bytes,
            before=before,
            state_bytes=state_bytes,
            state_bytes_asleep=state_bytes_asleep,
            resident=awake,
            alive=living,
            alive_asleep=alive_asleep,
            gradients_asleep=gradients_asleep,
            sleeps=sleeps,
            resident_asleep=asleep,
            again=again,
            refused=refused,
            wakes=wakes,
            after=after,
            then=then,
            end=state_of(worker),
        )


def held_after_a_step(setup: Setup) -> tuple[dict[MemoryKind, int], dict[MemoryKind, int]]:
    """Bytes that a rank holds of each kind after a step, and those that its spec predicts."""
    with running(setup) as worker:
        train(worker, setup, 0)
        config, ranks = worker.backend.config, worker.backend.context.world_size
        hf = hf_config(config.model)
        cluster = ClusterInfo(
            device=setup.device, ranks=ranks, model=hf.to_dict(), train=config.train, lora=config.lora
        )
        memory = load(Kind.BACKENDS, setup.backend).spec.memory
        assert memory is not None  # the check has asked
        predicted = memory(config.options, cluster, size_of(meta_model(hf, lora=config.lora)))
        return {kind: resident(worker, kind) for kind in MemoryKind}, dict(predicted.kinds)


def resident(worker: Worker, kind: MemoryKind) -> int:
    """Bytes of a kind's storages, without step counters and other 0-d tensors, which do not sleep."""
    return resident_bytes(tensor for tensor in worker.backend.tensors(kind) if tensor.ndim)


def alive() -> int:
    """Bytes of the distinct storages of every tensor in the process, found by the garbage collector. Fake tensors that
    torch keeps from compilation have no storage, and may have symbolic sizes."""
    return resident_bytes(_living())


def gradients() -> int:
    """Bytes of the gradients of every tensor in the process; the garbage collector does not know those that no Python
    code holds."""
    return resident_bytes(each.grad for each in _living() if each.is_leaf and each.grad is not None)


def _living() -> list[torch.Tensor]:
    gc.collect()
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return [each for each in found if not isinstance(each, FakeTensor) and each.device.type != "meta"]


@frozen(kw_only=True)
class Read:
    """What the verbs that read parameters return, to the last bit."""

    outputs: Mapping[str, bytes]  # of forward
    sent: Mapping[str, bytes]  # by update_weights, on the sending rank


@frozen(kw_only=True)
class Partly:
    awake: Read
    asleep: Read  # the same while only parameters are awake
    errors: Mapping[str, str]  # verb -> error meanwhile, "" if it works


def sleep_partly(setup: Setup, directory: str) -> Partly:
    """Train two steps, then put all kinds but parameters to sleep."""
    with running(setup) as worker:
        for number in (0, 1):
            train(worker, setup, number)
        awake: dict[str, dict[str, bytes]] = {"outputs": {}, "sent": {}}
        asleep: dict[str, dict[str, bytes]] = {"outputs": {}, "sent": {}}

        def pass_through(found: dict[str, dict[str, bytes]]) -> None:
            result = forward(worker, setup, make_samples(1))
            found["outputs"] = {output.value: values.tobytes() for output, values in result.outputs.items()}

        def send(found: dict[str, dict[str, bytes]], version: int) -> None:
            def keep(bucket: Mapping[str, torch.Tensor]) -> None:
                found["sent"].update({name: values.float().cpu().numpy().tobytes() for name, values in bucket.items()})

            worker.host.update_weights(InProcessSender(keep), version=version)

        pass_through(awake)
        send(awake, version=1)
        worker.sleep(frozenset(MemoryKind) - {MemoryKind.PARAM})
        errors = {
            "forward": error_of(lambda: pass_through(asleep)),
            "update_weights": error_of(lambda: send(asleep, version=2)),
            "forward_backward": error_of(lambda: train(worker, setup, 2)),
            "save": error_of(lambda: worker.save(directory, step_at(2), False)),
        }
        return Partly(awake=Read(**awake), asleep=Read(**asleep), errors=errors)


FLOAT32 = 4
COPIES = 8  # of the adapters, in float32: working copy, master, gradient, moments, and room for padding and buckets
ROOM = 2**16  # bytes for buffers of tiny models


@frozen(kw_only=True)
class Adapted:
    precisions: set[str]  # of the weights other than adapters
    held: int  # bytes of all that the role has after a step
    allowed: int


def adapt(setup: Setup) -> Adapted:
    with running(setup) as worker:  # first: what a process keeps from then on is there before
        train(worker, setup, 0)
    del worker
    before = alive()
    with running(setup) as worker:
        train(worker, setup, 0)
        held = alive() - before
        chunks = worker.backend.local_state(StateKey.PARAM)
        weights = [chunk.view for chunk in chunks if not is_adapter(chunk.name)]
        adapters = sum(chunk.view.numel() for chunk in chunks if is_adapter(chunk.name))
        return Adapted(
            precisions={str(view.dtype).removeprefix("torch.") for view in weights},
            held=held,
            allowed=sum(view.nbytes for view in weights) + COPIES * FLOAT32 * adapters + ROOM,
        )
