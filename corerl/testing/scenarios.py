"""What every rank does for one check, and what it reports: plain data, judged where all reports come together."""

from __future__ import annotations

import copy
import gc
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from attrs import evolve, field, frozen
from torch._subclasses import FakeTensor

from corerl.backend.base import StateKey
from corerl.checkpoint.reader import written_ranks
from corerl.checkpoint.writer import BackgroundWriter
from corerl.data.plan import plan_forward
from corerl.errors import CorerlError
from corerl.memory.storage import resident_bytes
from corerl.plugin.capabilities import Capability
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
from corerl.testing.losses import LIKELIHOOD
from corerl.testing.pool import OneRank
from corerl.trainer.worker import Worker
from corerl.types import (
    Array,
    ForwardResult,
    InitResult,
    MemoryKind,
    MicroBatch,
    Output,
    PackedBatch,
    SampleBatch,
    SleepResult,
    TrainResult,
    UpdateResult,
    WakeResult,
)
from corerl.weights.chunks import TensorSource
from corerl.weights.manifest import Bucket
from corerl.weights.transport import Address
from corerl.weights.transports.inprocess import InProcessSender

SNAPSHOT_ACTIONS: list[tuple[str, dict[str, str]]] = [("create", {}), ("drop", {}), ("load", {"path": ""})]
EXPERTS = Output.ROUTED_EXPERTS.value
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
    weights: int  # that forward reads, replicas included
    resident: int  # these, masters, and memory for gradients that is there from the start
    peak: int  # held at once while loading
    snapshot_peak: int  # held at once while a snapshot was made, and while one was loaded
    state: State


class Counted:
    """A source, and the bytes that were read of it, in its own dtype."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.bytes_read = 0

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._source.shape(name)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        values = self._source.read(name, offsets, sizes)
        self.bytes_read += values.numel() * values.element_size()
        return values


def load_watched(setup: Setup, resume: str, snapshots: bool) -> Loaded:
    start(setup)[0].shutdown("what is imported or cached once is not the model's")
    worker = make_worker(setup, resume=resume)
    open_source = worker.backend.initial_weights
    sources: list[Counted] = []

    def opened() -> TensorSource:
        sources.append(source := Counted(open_source()))
        return source

    worker.backend.initial_weights = opened  # type: ignore[method-assign]
    with Allocations() as found:
        worker.init("127.0.0.1", 0)
    chunks = worker.backend.local_state(StateKey.MASTER)
    read = sum(source.bytes_read for source in sources)
    with Allocations() as of_snapshots:
        for action, arguments in SNAPSHOT_ACTIONS if snapshots else ():
            worker.snapshot(action, "reference", arguments)
    report = Loaded(
        read=read,
        held=sum(chunk.view.numel() * 4 for chunk in chunks),
        owned=sum(chunk.view.numel() * 4 for chunk in chunks if not chunk.replica),
        weights=resident_bytes(worker.backend.tensors(MemoryKind.PARAM)),
        resident=resident_bytes(
            tensor
            for kind in (MemoryKind.PARAM, MemoryKind.MASTER, MemoryKind.GRAD)
            for tensor in worker.backend.tensors(kind)
        ),
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
class Replayed:
    chosen: ForwardResult  # log-probs, and the experts that routers choose
    told: ForwardResult  # the same where the experts are told
    result: TrainResult  # of a step through those that are told
    state: State  # after it
    chosen_after: ForwardResult
    told_after: ForwardResult


def replay_experts(setup: Setup, samples: SampleBatch, lr: float) -> Replayed:
    """`samples` tell the experts, in their column `routed_experts`."""
    free = evolve(samples, columns={name: samples.columns[name] for name in samples.columns if name != EXPERTS})
    with running(setup) as worker:

        def passed(samples: SampleBatch) -> ForwardResult:
            return forward(worker, setup, samples, outputs=(Output.LOGPROBS, Output.ROUTED_EXPERTS))

        chosen, told = passed(free), passed(samples)
        batch = packed_for_training(worker, setup, samples)
        result = worker.host.train(batch=batch, loss=LIKELIHOOD, step=evolve(step_at(0), lr=lr))
        return Replayed(
            chosen=chosen,
            told=told,
            result=result,
            state=state_of(worker),
            chosen_after=passed(free),
            told_after=passed(samples),
        )


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


@frozen(kw_only=True)
class Overfitted:
    before: ForwardResult
    after: ForwardResult
    losses: list[float]  # of this rank


def overfit(setup: Setup, samples: SampleBatch, steps: int, lr: float) -> Overfitted:
    """Many steps on one batch, with a loss that is none of CoreRL's."""
    with running(setup) as worker:
        before = forward(worker, setup, samples)
        batch = packed_for_training(worker, setup, samples)
        results = [
            worker.host.train(batch=batch, loss=LIKELIHOOD, step=evolve(step_at(number), lr=lr))
            for number in range(steps)
        ]
        losses = [result.metrics["loss"].value for result in results]
        return Overfitted(before=before, after=forward(worker, setup, samples), losses=losses)


def train_on_garbage(setup: Setup, samples: SampleBatch, *, seed: int = 0) -> TrainResult:
    """One step with other tokens and columns wherever padding and fillers lie."""
    rng = np.random.default_rng(seed)
    with running(setup) as worker:
        batch = packed_for_training(worker, setup, samples)
        changed = []
        for micro in batch.micro_batches:
            padding = np.ones(len(micro.tokens), dtype=np.bool_)
            for sequence, (start, length) in enumerate(zip(micro.cu_seqlens[:-1], micro.lengths, strict=True)):
                padding[start : start + length] = micro.samples[sequence] < 0
            tokens = np.where(padding, rng.integers(3, 97, len(padding)), micro.tokens)
            columns = {
                name: column
                if name == "weights"
                else np.where(padding, rng.normal(0.0, 3.0, len(padding)), column).astype(column.dtype)
                for name, column in micro.columns.items()
            }
            changed.append(evolve(micro, tokens=tokens, columns=columns))
        return worker.host.train(batch=evolve(batch, micro_batches=changed), loss=setup.loss, step=step_at(0))


def saved_for_backward(setup: Setup, number: int) -> tuple[TrainResult, int]:
    """A step, and the most bytes of tensors that its forward passes keep at once for the backward pass."""
    kept = most = 0

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal kept, most
            self.tensor = tensor
            kept += tensor.numel() * tensor.element_size()
            most = max(most, kept)

        def __del__(self) -> None:
            nonlocal kept
            kept -= self.tensor.numel() * self.tensor.element_size()

    with running(setup) as worker, torch.autograd.graph.saved_tensors_hooks(Kept, lambda held: held.tensor):
        return train(worker, setup, number), most


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
        result = worker.host.update_weights(make(receive), 1)
        arrived = len(names)
        refused = _error(lambda: worker.host.update_weights(make(receive), 1))
        arrived_after = len(names) - arrived
        return Pushed(
            result=result,
            names=names[:arrived],
            tensors=tensors,
            state=state_of(worker),
            refused=refused,
            arrived_after=arrived_after,
        )


@frozen(kw_only=True)
class PushedWatched:
    """What the first update takes, whose tensors nobody keeps: memory that later ones use again counts."""

    largest: int  # bytes of one tensor
    peak: int  # bytes held at once; transports' threads may free some of it late
    bucket: int  # bytes of the largest bucket


def push_watched(setup: Setup) -> PushedWatched:
    with running(setup) as worker:
        train(worker, setup, 0)
        with Allocations() as found:
            worker.host.update_weights(InProcessSender(lambda bucket: None), 1)
        item = torch.empty(0, dtype=getattr(torch, worker.manifest().dtype)).element_size()
        bucket = max(bucket.numel * item for bucket in worker.manifest().buckets)
        return PushedWatched(largest=found.largest, peak=found.peak, bucket=bucket)


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
    alive: int  # bytes of all storages of the process while awake, whoever holds them
    alive_asleep: int  # with the copies on the host, which on a CPU lie beside what they stand for
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
        alive = _alive()
        sleeps, asleep = [], []
        for kind in down:
            sleeps.append(worker.sleep({kind}))
            asleep.append(_resident(worker, kind))
        state_bytes_asleep, alive_asleep = resident_bytes(views), _alive()
        again = worker.sleep(frozenset(MemoryKind))
        refused = {
            "train": _error(lambda: train(worker, setup, 2)),
            "forward": _error(lambda: forward(worker, setup, samples_at(0))),
            "update_weights": _error(
                lambda: worker.host.update_weights(InProcessSender(lambda bucket: None), version=1)
            ),
            "save": _error(lambda: worker.save(directory, step_at(2), False)),
        }
        wakes = [worker.wake_up({kind}) for kind in up]
        after = state_of(worker)
        then = [train(worker, setup, number) for number in (2, 3)]
        return Slept(
            before=before,
            state_bytes=state_bytes,
            state_bytes_asleep=state_bytes_asleep,
            resident=resident,
            alive=alive,
            alive_asleep=alive_asleep,
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


def _alive() -> int:
    """Bytes of the distinct storages of every tensor that there is, nobody's list of them believed. Those that torch
    keeps of what it has compiled have none: their sizes may even be symbols."""
    gc.collect()
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return resident_bytes(each for each in found if not isinstance(each, FakeTensor) and each.device.type != "meta")


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


# ---- refusals --------------------------------------------------------------------------------------------------------


def start_refused(setup: Setup, resume: str = "") -> str:
    """The error of starting a worker."""
    return _error(lambda: make_worker(setup, resume=resume).init("127.0.0.1", 0))


def refusals(setup: Setup, lacks: Sequence[Capability], directory: str) -> dict[str, list[str]]:
    """Capability -> the errors of the verbs that ask for it, "" where one works. Those that are no verb's are left out;
    some of these are asked for with `start_refused`."""
    samples = make_samples(0)
    plan = plan_forward(samples, dp_size=1, tokens_per_micro_batch=48, sequence_multiple=1, micro_batch_multiple=1)
    told = samples.with_columns(**{EXPERTS: np.zeros((len(samples.tokens), 1, 1), np.int16)})
    with running(setup) as worker:

        def update(transport: str) -> None:
            address = Address(transport=transport, engines=("engine-0",), path=directory, timeout=1.0)
            worker.update_weights(address, 1)

        verbs: dict[Capability, list[Callable[[], object]]] = {
            Capability.SNAPSHOTS: [lambda: worker.snapshot("create", "reference", {})],
            Capability.SLEEP: [
                lambda: worker.sleep(frozenset(MemoryKind)),
                lambda: worker.wake_up(frozenset(MemoryKind)),
            ],
            Capability.SAVE_BACKGROUND: [lambda: worker.save(directory, step_at(0), True)],
            Capability.ROUTING_REPLAY: [
                lambda: worker.forward(samples, plan, (Output.ROUTED_EXPERTS,)),
                lambda: worker.forward(told, plan, (Output.LOGPROBS,), replay=True),
                lambda: worker.train(told, plan, LOSS, step_at(0)),
            ],
            Capability.UPDATE_DISK: [lambda: update("disk")],
            Capability.UPDATE_COLLECTIVE: [lambda: update("collective")],
            Capability.UPDATE_IPC: [lambda: update("ipc")],
        }
        return {name: [_error(call) for call in verbs[name]] for name in lacks if name in verbs}


# ---- states and errors -----------------------------------------------------------------------------------------------


class Fault(Exception):
    """That a check asked for."""


@frozen(eq=False)
class Failing:
    """Micro-batches of which the second is never given."""

    micro_batches: list[MicroBatch]
    error: BaseException

    def __iter__(self) -> Iterator[MicroBatch]:
        yield self.micro_batches[0]
        raise self.error


def failing(batch: PackedBatch, error: BaseException) -> PackedBatch:
    return evolve(batch, micro_batches=Failing(list(batch.micro_batches), error))


@frozen(kw_only=True)
class States:
    before_init: Mapping[str, str]  # verb -> error
    init_again: str
    results: list[TrainResult]  # of steps 0 to 2, all this in between
    after_shutdown: Mapping[str, str]
    shutdown_again: str


def go_through_states(setup: Setup, directory: str) -> States:
    worker = make_worker(setup)

    def verbs() -> dict[str, str]:
        return {
            "forward": _error(lambda: worker.host.forward(batch=None, outputs=(), weights="")),  # type: ignore[arg-type]
            "train": _error(lambda: worker.host.train(batch=None, loss=LOSS, step=step_at(0))),  # type: ignore[arg-type]
            "update_weights": _error(lambda: worker.host.update_weights(sender=None, version=1)),
            "save": _error(lambda: worker.save(directory, step_at(0), False)),
        }

    before_init = verbs()
    worker.init("127.0.0.1", 0)
    results = [train(worker, setup, 0)]
    again = _error(lambda: worker.init("127.0.0.1", 0))
    results += [train(worker, setup, 1), train(worker, setup, 2)]
    worker.shutdown("the check is done")
    return States(
        before_init=before_init,
        init_again=again,
        results=results,
        after_shutdown=verbs(),
        shutdown_again=_error(lambda: worker.shutdown("once more")),
    )


@frozen(kw_only=True)
class Raised:
    """An error that left a hook."""

    message: str
    details: str
    then: str  # what training says after it, "" where it works
    result: TrainResult | None = None


def raise_in_forward(setup: Setup) -> Raised:
    """Step 0, a forward pass that fails, step 1."""
    with running(setup) as worker:
        train(worker, setup, 0)
        batch = failing(packed_for_training(worker, setup, samples_at(1)), Fault("no such batch"))
        found = _raised(lambda: worker.host.forward(batch=batch, outputs=LOSS.outputs, weights=""))
        return evolve(found, result=train(worker, setup, 1))


def raise_in_train(setup: Setup, exits: bool) -> Raised:
    """Step 0, a step that fails or calls exit(), and another."""
    error = SystemExit("no such batch") if exits else Fault("no such batch")
    worker, _ = start(setup)
    train(worker, setup, 0)
    batch = failing(packed_for_training(worker, setup, samples_at(1)), error)
    found = _raised(lambda: worker.host.train(batch=batch, loss=setup.loss, step=step_at(1)))
    found = evolve(found, then=_error(lambda: train(worker, setup, 2)))
    worker.shutdown("the check is done")
    return found


def raise_on_the_last_rank(setup: Setup) -> TrainResult:
    """The others train, and wait for it."""
    with running(setup) as worker:
        train(worker, setup, 0)
        batch = packed_for_training(worker, setup, samples_at(1))
        if worker.context.rank == worker.context.world_size - 1:
            batch = failing(batch, Fault("no such batch"))
        return worker.host.train(batch=batch, loss=setup.loss, step=step_at(1))


def _raised(call: Callable[[], object]) -> Raised:
    try:
        call()
    except CorerlError as error:
        return Raised(message=f"{type(error).__name__}: {error.message}", details=error.details, then="")
    return Raised(message="", details="", then="")


@frozen(kw_only=True)
class Lives:
    """Two workers, one after the other, in a process that is in no group."""

    results: list[list[TrainResult]]
    left: list[str]  # threads that were not there before and keep the process alive, groups, files that miss
    shutdown_again: str


def live_twice(setup: Setup, directory: str, background: bool) -> Lives:
    before = set(threading.enumerate())
    results, left, again = [], [], ""
    for life in range(2):
        worker, _ = start(setup)
        results.append([train(worker, setup, number) for number in (0, 1)])
        where = f"{directory}/{life}"
        worker.save(where, step_at(2), background)
        worker.shutdown("the check is done")
        again = again or _error(lambda worker=worker: worker.shutdown("once more"))  # type: ignore[misc]
        left += [thread.name for thread in threading.enumerate() if thread not in before and not thread.daemon]
        left += ["a process group"] if torch.distributed.is_initialized() else []
        left += [] if written_ranks(Path(where)) == 1 else ["a checkpoint that is not whole"]
    return Lives(results=results, left=left, shutdown_again=again)


def save_and_be_killed(setup: Setup, whole: str, cut: str, limit: int) -> None:
    """One save, and another in which the process dies as soon as it has written `limit` bytes to a file."""
    with running(setup) as worker:
        train(worker, setup, 0)
        worker.save(whole, step_at(1), False)
        train(worker, setup, 1)
        # The kernel ends the process inside write(), as SIGKILL would: Python is not asked.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        worker.save(cut, step_at(2), False)


def alone(scenario: Callable[..., object], *arguments: object) -> None:
    """In a process that was started for this one scenario."""
    torch.set_num_threads(1)
    OneRank().run(scenario, *arguments)
