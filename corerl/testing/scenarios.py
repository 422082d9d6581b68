"""What every rank does for one check, and what it reports: plain data, judged where all reports come together."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen

from corerl.backend.base import StateKey
from corerl.checkpoint.writer import BackgroundWriter
from corerl.errors import CorerlError
from corerl.memory.storage import resident_bytes
from corerl.testing.allocations import Allocations
from corerl.testing.harness import (
    LOSS,
    Setup,
    State,
    forward,
    make_samples,
    make_worker,
    packed_for_training,
    running,
    samples_at,
    start,
    state_of,
    step_at,
    train,
)
from corerl.trainer.worker import Worker
from corerl.types import (
    Array,
    ForwardResult,
    InitResult,
    MemoryKind,
    MicroBatch,
    SampleBatch,
    SleepResult,
    TrainResult,
    UpdateResult,
    WakeResult,
)
from corerl.weights.chunks import TensorSource
from corerl.weights.manifest import Bucket
from corerl.weights.transports.inprocess import InProcessSender

HELD_SECONDS = 60.0  # against hangs: how long a held writer waits to be released


@frozen(kw_only=True)
class Trained:
    """One rank's part of some optimizer steps."""

    init: InitResult
    at_start: State
    results: list[TrainResult]
    state: State  # at the end
    adam_step: int


def train_steps(
    setup: Setup, numbers: Sequence[int], resume: str = "", save_after: int = -1, save_to: str = ""
) -> Trained:
    """Steps `numbers`; after step `save_after` the rank's part of a checkpoint goes to `save_to`."""
    worker, init = start(setup, resume=resume)
    at_start = state_of(worker)
    results = []
    for number in numbers:
        results.append(train(worker, setup, number))
        if number == save_after:
            saved = worker.save(save_to, step_at(number + 1), False)
            assert saved.complete and saved.path == save_to, saved
    report = Trained(
        init=init, at_start=at_start, results=results, state=state_of(worker), adam_step=worker.backend.adam_step
    )
    worker.shutdown("the check is done")
    return report


# ---- init ------------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Loaded:
    """What loading took. Bytes of parameters in float32."""

    read: int  # out of the model's files
    held: int  # by this rank, replicas included
    owned: int  # without replicas
    peak: int  # held at once while loading
    snapshot_peak: int  # held at once while a snapshot was made, and while one was loaded
    state: State


def load_watched(setup: Setup, resume: str = "") -> Loaded:
    start(setup)[0].shutdown("what is imported or cached once is not the model's")
    worker = make_worker(setup, resume=resume)
    open_source = worker.backend.initial_weights
    sources: list[Any] = []

    def opened() -> TensorSource:
        sources.append(source := open_source())
        return source

    worker.backend.initial_weights = opened  # type: ignore[method-assign]
    with Allocations() as found:
        worker.init("127.0.0.1", 0)
    chunks = worker.backend.local_state(StateKey.MASTER)
    read = sum(source.bytes_read for source in sources)
    with Allocations() as of_snapshots:
        worker.snapshot("create", "reference", {})
        worker.snapshot("drop", "reference", {})
        worker.snapshot("load", "reference", {"path": ""})
    report = Loaded(
        read=read,
        held=sum(chunk.view.numel() * 4 for chunk in chunks),
        owned=sum(chunk.view.numel() * 4 for chunk in chunks if not chunk.replica),
        peak=found.peak,
        snapshot_peak=of_snapshots.peak,
        state=state_of(worker),
    )
    worker.shutdown("the check is done")
    return report


# ---- train and forward -----------------------------------------------------------------------------------------------


def forward_only(setup: Setup, samples: SampleBatch) -> ForwardResult:
    with running(setup) as worker:
        return forward(worker, setup, samples)


@frozen(kw_only=True)
class Skipped:
    before: State
    steps_before: int
    result: TrainResult
    after: State
    steps_after: int
    then: TrainResult  # of the next step, on good samples
    end: State


def skip_a_step(setup: Setup) -> Skipped:
    """Steps 0 and 1, then one whose first sample has advantages that are not finite, then step 2."""
    with running(setup) as worker:
        for number in (0, 1):
            train(worker, setup, number)
        before, steps_before = state_of(worker), worker.backend.adam_step
        samples = samples_at(1)
        advantages = samples.columns["advantages"].copy()
        advantages[: samples.offsets[1]] = np.nan
        result = train(worker, setup, 2, samples=samples.with_columns(advantages=advantages))
        after, steps_after = state_of(worker), worker.backend.adam_step
        then = train(worker, setup, 2)
        return Skipped(
            before=before,
            steps_before=steps_before,
            result=result,
            after=after,
            steps_after=steps_after,
            then=then,
            end=state_of(worker),
        )


def train_on(setup: Setup, samples: SampleBatch) -> TrainResult:
    """One step on these samples."""
    with running(setup) as worker:
        return train(worker, setup, 0, samples=samples)


def changed_in_batches(setup: Setup) -> list[str]:
    """Train, then forward, on read-only arrays, as the object store gives them; what is not as it was."""
    with running(setup) as worker:
        batch = packed_for_training(worker, setup, samples_at(0))
        micro_batches = list(batch.micro_batches)
        for micro in micro_batches:
            for array in _arrays(micro).values():
                array.flags.writeable = False
        before = copy.deepcopy(micro_batches)
        batch = evolve(batch, micro_batches=micro_batches)
        worker.host.train(batch=batch, loss=LOSS, step=step_at(0))
        worker.host.forward(batch=batch, outputs=LOSS.outputs, weights="")
        if len(list(batch.micro_batches)) != len(before):
            return ["the list of micro-batches"]
        return [
            f"{name} of micro-batch {index}"
            for index, (now, then) in enumerate(zip(micro_batches, before, strict=True))
            for name, array in _arrays(now).items()
            if not np.array_equal(array, _arrays(then)[name])
        ]


def _arrays(micro: MicroBatch) -> dict[str, Array]:
    own = {name: getattr(micro, name) for name in ("tokens", "positions", "cu_seqlens", "lengths", "samples")}
    return {**own, **micro.columns}


# ---- snapshots -------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Snapshotted:
    first: ForwardResult  # of the weights that the snapshot was made of
    kept: ForwardResult  # of the snapshot, three steps later
    started_from: ForwardResult  # of a snapshot loaded from what the run started from
    other: ForwardResult  # of a snapshot loaded from another directory
    current: ForwardResult
    before: State  # before the snapshots are used
    after: State
    then: TrainResult  # of a step after that
    dropped: str  # the error on using a snapshot that was dropped


def use_snapshots(setup: Setup, samples: SampleBatch, other: str) -> Snapshotted:
    with running(setup) as worker:
        first = forward(worker, setup, samples)
        worker.snapshot("create", "reference", {})
        for number in range(3):
            train(worker, setup, number)
        before = state_of(worker)
        kept = forward(worker, setup, samples, weights="reference")
        worker.snapshot("load", "start", {"path": ""})
        worker.snapshot("load", "other", {"path": other})
        started_from = forward(worker, setup, samples, weights="start")
        of_other = forward(worker, setup, samples, weights="other")
        after = state_of(worker)
        current = forward(worker, setup, samples)
        worker.snapshot("drop", "reference", {})
        dropped = _error(lambda: forward(worker, setup, samples, weights="reference"))
        return Snapshotted(
            first=first,
            kept=kept,
            started_from=started_from,
            other=of_other,
            current=current,
            before=before,
            after=after,
            then=train(worker, setup, 3),
            dropped=dropped,
        )


# ---- saving ----------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class SavedInBackground:
    complete: bool  # said when the save began
    while_held: bool  # said while the writer was held
    when_released: bool
    files_while_held: list[str]  # of this rank
    at_save: State
    after_step: State  # of the step that was trained while the writer was held


def save_in_background(setup: Setup, directory: str) -> SavedInBackground:
    """The writer is held from the beginning of the save until another step is trained."""
    release = threading.Event()

    def held(job: Callable[[], object]) -> None:
        if not release.wait(HELD_SECONDS):
            raise TimeoutError("the writer was never released")
        job()

    with running(setup) as worker:
        worker.backend._writer = BackgroundWriter(held)
        train(worker, setup, 0)
        at_save = state_of(worker)
        saved = worker.save(directory, step_at(1), True)
        while_held = worker.saved(False)
        train(worker, setup, 1)
        after_step = state_of(worker)
        files = [path.name for path in Path(directory).glob(f"*{worker.context.rank:05d}*")]
        release.set()
        return SavedInBackground(
            complete=saved.complete,
            while_held=while_held,
            when_released=worker.saved(True),
            files_while_held=files,
            at_save=at_save,
            after_step=after_step,
        )


def fail_to_save_in_background(setup: Setup, directory: str) -> tuple[str, str]:
    """The errors of asking whether it is saved, and of saving again to where it works."""
    with running(setup) as worker:
        worker.save(directory, step_at(0), True)
        failure = _error(lambda: worker.saved(True))
        return failure, _error(lambda: worker.save(f"{directory}-elsewhere", step_at(0), False))


# ---- weight updates --------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Pushed:
    result: UpdateResult
    names: list[str]  # as they arrived on this rank
    tensors: dict[str, Array]
    state: State
    refused: str  # the error on sending the same version again
    arrived_after: int  # tensors that came with it
    largest: int  # bytes of one tensor, in an update whose tensors nobody keeps
    peak: int  # bytes held at once by it; transports' threads may free some of it late
    bucket: int  # bytes of the largest bucket
    resumed_version: int = 0


class EveryRankSender(InProcessSender):
    """As for an engine that has a part on each rank: all of them must hold each bucket."""

    every_rank = True


def push_weights(setup: Setup, every_rank: bool) -> Pushed:
    """Train two steps, then send all weights to an engine in the process of each rank that sends."""
    names: list[str] = []
    tensors: dict[str, Array] = {}

    def receive(bucket: Mapping[str, torch.Tensor]) -> None:
        names.extend(bucket)
        tensors.update({name: value.float().cpu().numpy().copy() for name, value in bucket.items()})

    make = EveryRankSender if every_rank else InProcessSender
    with running(setup) as worker:
        for number in (0, 1):
            train(worker, setup, number)
        with Allocations() as found:  # the first update, which finds no memory that an earlier one left
            worker.host.update_weights(make(lambda bucket: None), 0)
        result = worker.host.update_weights(make(receive), 1)
        arrived = len(names)
        refused = _error(lambda: worker.host.update_weights(make(receive), 1))
        arrived_after = len(names) - arrived
        item = torch.empty(0, dtype=getattr(torch, worker.manifest().dtype)).element_size()
        return Pushed(
            result=result,
            names=names[:arrived],
            tensors=tensors,
            state=state_of(worker),
            refused=refused,
            arrived_after=arrived_after,
            largest=found.largest,
            peak=found.peak,
            bucket=max(bucket.numel * item for bucket in worker.manifest().buckets),
        )


@frozen(kw_only=True)
class EngineFailure:
    result: UpdateResult
    then: UpdateResult  # of the next update, to an engine that works
    names: list[str]  # that it received
    wanted: list[str]


class FailingSender(InProcessSender):
    """An engine that fails at its second bucket."""

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if bucket.index == 1:
            self._error = "out of memory"
        super().send(bucket, flat)


def push_to_a_failing_engine(setup: Setup) -> EngineFailure:
    names: list[str] = []
    with running(setup) as worker:
        result = worker.host.update_weights(FailingSender(lambda bucket: None), 1)
        train(worker, setup, 0)
        then = worker.host.update_weights(InProcessSender(names.extend), 2)
        return EngineFailure(result=result, then=then, names=names, wanted=worker.manifest().names)


def version_after_resume(setup: Setup, directory: str) -> tuple[int, str]:
    """The version that a resumed worker reports, and its error on being sent an older one."""
    with running(setup) as worker:
        worker.host.update_weights(InProcessSender(lambda bucket: None), 7)
        worker.save(directory, step_at(0), False)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # every rank has written before any reads
    worker, init = start(setup, resume=directory)
    refused = _error(lambda: worker.host.update_weights(InProcessSender(lambda bucket: None), 6))
    worker.shutdown("the check is done")
    return init.weights_version, refused


# ---- sleep -----------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Slept:
    before: State
    state_bytes: int  # of the storages that weights and moments lie in, while awake
    state_bytes_asleep: int
    resident: Mapping[MemoryKind, int]  # bytes of each kind's storages while awake
    sleeps: Sequence[SleepResult]
    resident_asleep: Sequence[int]  # bytes of each sleeping kind's storages, right after
    again: SleepResult  # of sleeping once more
    refused: Mapping[str, str]  # verb -> error while everything sleeps
    wakes: Sequence[WakeResult]
    after: State
    then: list[TrainResult] = field(factory=list)
    end: State


def sleep_and_wake(setup: Setup, down: Sequence[MemoryKind], up: Sequence[MemoryKind], directory: str) -> Slept:
    """Steps 0 and 1, every kind asleep and awake in the orders given, then steps 2 and 3."""
    with running(setup) as worker:
        for number in (0, 1):
            train(worker, setup, number)
        before = state_of(worker)
        views = [chunk.view for key in StateKey for chunk in worker.backend.local_state(key)]
        state_bytes = resident_bytes(views)
        resident = {kind: _resident(worker, kind) for kind in MemoryKind}
        sleeps, asleep = [], []
        for kind in down:
            sleeps.append(worker.sleep({kind}))
            asleep.append(_resident(worker, kind))
        state_bytes_asleep = resident_bytes(views)
        again = worker.sleep(frozenset(MemoryKind))
        refused = {
            "train": _error(lambda: train(worker, setup, 2)),
            "forward": _error(lambda: forward(worker, setup, samples_at(0))),
            "update_weights": _error(
                lambda: worker.host.update_weights(InProcessSender(lambda bucket: None), version=1)
            ),
            "save": _error(lambda: worker.save(directory, step_at(2), False)),
            "snapshot": _error(lambda: worker.snapshot("create", "reference", {})),
        }
        wakes = [worker.wake_up({kind}) for kind in up]
        after = state_of(worker)
        then = [train(worker, setup, number) for number in (2, 3)]
        return Slept(
            before=before,
            state_bytes=state_bytes,
            state_bytes_asleep=state_bytes_asleep,
            resident=resident,
            sleeps=sleeps,
            resident_asleep=asleep,
            again=again,
            refused=refused,
            wakes=wakes,
            after=after,
            then=then,
            end=state_of(worker),
        )


def _resident(worker: Worker, kind: MemoryKind) -> int:
    """Without the step counters and other single numbers, which need not sleep."""
    return resident_bytes(tensor for tensor in worker.backend.tensors(kind) if tensor.ndim)


def sleep_partly(setup: Setup, directory: str) -> Mapping[str, str]:
    """With moments asleep: verb -> error, "" where it works."""
    with running(setup) as worker:
        train(worker, setup, 0)
        worker.sleep({MemoryKind.OPTIMIZER})
        return {
            "forward": _error(lambda: forward(worker, setup, make_samples(1))),
            "update_weights": _error(
                lambda: worker.host.update_weights(InProcessSender(lambda bucket: None), version=1)
            ),
            "train": _error(lambda: train(worker, setup, 1)),
            "save": _error(lambda: worker.save(directory, step_at(1), False)),
        }


def _error(call: Callable[[], object]) -> str:
    """Its type and message, "" where nothing is raised."""
    try:
        call()
    except CorerlError as error:
        return f"{type(error).__name__}: {error.message}"
    return ""
