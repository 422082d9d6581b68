"""What a worker refuses, how errors leave it, and whether a second one works in the same process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from attrs import evolve, frozen

from corerl.checkpoint.reader import written_ranks
from corerl.data import plan_forward
from corerl.errors import CorerlError
from corerl.plugin import Capability
from corerl.types import (
    MemoryKind,
    MicroBatch,
    Output,
    PackedBatch,
    ParallelLayout,
    TrainResult,
)
from corerl.weights import Address
from corerl_testing.harness import (
    LOSS,
    Setup,
    error_of,
    make_samples,
    make_worker,
    packed_for_training,
    running,
    samples_at,
    start,
    step_at,
    train,
)
from corerl_testing.scenarios.training import EXPERTS


def start_refused(setup: Setup, resume: str = "") -> str:
    """The error of starting a worker; "" if it starts."""
    return error_of(lambda: make_worker(setup, resume=resume).init("127.0.0.1", 0))


def refusals(setup: Setup, lacks: Sequence[Capability], directory: str) -> dict[str, list[str]]:
    """Capability -> the errors of the verbs that need it, "" if one works. Capabilities that no verb needs are left
    out; some of these are tested with `start_refused`."""
    samples = make_samples(0)
    plan = plan_forward(samples, ParallelLayout.data_parallel(rank=0, world_size=1), tokens_per_micro_batch=32)
    share = plan.shard_of(0)
    with_experts = samples.with_columns(**{EXPERTS: np.zeros((len(samples.tokens), 1, 1), np.int16)})
    with running(setup) as worker:

        def update(transport: str) -> None:
            address = Address(transport=transport, engines=("engine-0",), path=directory, timeout=1.0)
            worker.update_weights(address, 1)

        verbs: dict[Capability, list[Callable[[], object]]] = {
            Capability.SNAPSHOTS: [lambda: worker.create_snapshot("reference")],
            Capability.SLEEP: [
                lambda: worker.sleep(frozenset(MemoryKind)),
                lambda: worker.wake_up(frozenset(MemoryKind)),
            ],
            Capability.SAVE_BACKGROUND: [lambda: worker.save(directory, step_at(0), True)],
            Capability.ROUTING_REPLAY: [
                lambda: worker.forward(samples, share, (Output.ROUTED_EXPERTS,)),
                lambda: worker.forward(with_experts, share, (Output.LOGPROBS,), replay=True),
                lambda: worker.train(with_experts, share, LOSS, step_at(0)),
            ],
            Capability.UPDATE_DISK: [lambda: update("disk")],
            Capability.UPDATE_COLLECTIVE: [lambda: update("collective")],
            Capability.UPDATE_IPC: [lambda: update("ipc")],
        }
        return {name: [error_of(call) for call in verbs[name]] for name in lacks if name in verbs}


class Fault(Exception):
    """An error that a check provokes."""


@frozen(eq=False)
class Failing:
    """Micro-batches that raise `error` instead of giving the second one."""

    micro_batches: list[MicroBatch]
    error: BaseException

    def __iter__(self) -> Iterator[MicroBatch]:
        yield self.micro_batches[0]
        raise self.error


def failing(batch: PackedBatch, error: BaseException) -> PackedBatch:
    assert batch.count > 1, "a backend that counts would not ask for a second micro-batch"
    return evolve(batch, micro_batches=Failing(list(batch.micro_batches), error))


@frozen(kw_only=True)
class States:
    before_init: Mapping[str, str]  # verb -> error
    init_again: str
    results: list[TrainResult]  # of steps 0 to 2, with the repeated init in between
    after_shutdown: Mapping[str, str]


def go_through_states(setup: Setup, directory: str) -> States:
    worker = make_worker(setup)

    def verbs() -> dict[str, str]:
        return {
            "forward": error_of(lambda: worker.host.forward(batch=None, outputs=(), snapshot="")),  # type: ignore[arg-type]
            "forward_backward": error_of(lambda: worker.train_on(batch=None, loss=LOSS, step=step_at(0))),  # type: ignore[arg-type]
            "update_weights": error_of(lambda: worker.host.update_weights(sender=None, version=1)),
            "save": error_of(lambda: worker.save(directory, step_at(0), False)),
        }

    before_init = verbs()
    worker.init("127.0.0.1", 0)
    results = [train(worker, setup, 0)]
    again = error_of(lambda: worker.init("127.0.0.1", 0))
    results += [train(worker, setup, 1), train(worker, setup, 2)]
    worker.shutdown("the check is done")
    return States(
        before_init=before_init,
        init_again=again,
        results=results,
        after_shutdown=verbs(),
    )


@frozen(kw_only=True)
class Raised:
    """An error that left a hook."""

    message: str
    details: str
    then: str  # the error of training afterwards, "" if it works
    result: TrainResult | None = None


def raise_in_forward(setup: Setup) -> Raised:
    """Train step 0, fail in a forward pass, then train step 1."""
    with running(setup) as worker:
        train(worker, setup, 0)
        batch = failing(packed_for_training(worker, setup, samples_at(1)), Fault("no such batch"))
        found = _raised(lambda: worker.host.forward(batch=batch, outputs=LOSS.outputs, snapshot=""))
        return evolve(found, result=train(worker, setup, 1))


def raise_in_train(setup: Setup, exits: bool) -> Raised:
    """Train step 0, then a step that fails or calls exit(), and try another."""
    error = SystemExit("no such batch") if exits else Fault("no such batch")
    worker, _ = start(setup)
    train(worker, setup, 0)
    batch = failing(packed_for_training(worker, setup, samples_at(1)), error)
    found = _raised(lambda: worker.train_on(batch=batch, loss=setup.loss, step=step_at(1)))
    found = evolve(found, then=error_of(lambda: train(worker, setup, 2)))
    worker.shutdown("the check is done")
    return found


def raise_on_the_last_rank(setup: Setup) -> TrainResult:
    """Raise on the last rank, while the others train and wait for it."""
    with running(setup) as worker:
        train(worker, setup, 0)
        batch = packed_for_training(worker, setup, samples_at(1))
        if worker.context.rank == worker.context.world_size - 1:
            batch = failing(batch, Fault("no such batch"))
        return worker.train_on(batch=batch, loss=setup.loss, step=step_at(1))


def _raised(call: Callable[[], object]) -> Raised:
    try:
        call()
    except CorerlError as error:
        return Raised(message=f"{type(error).__name__}: {error.message}", details=error.details, then="")
    return Raised(message="", details="", then="")


@frozen(kw_only=True)
class Lives:
    """Two workers, one after the other, in a process without a process group."""

    results: list[list[TrainResult]]
    left: list[str]  # what shutdown left behind: new non-daemon threads, process groups, incomplete checkpoints
    shutdown_again: str


def live_twice(setup: Setup, directory: str, background: bool) -> Lives:
    try:
        return _live_twice(setup, directory, background)
    finally:  # of a worker that failed, which has told all there is: the checks that follow are to start their own
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _live_twice(setup: Setup, directory: str, background: bool) -> Lives:
    before = set(threading.enumerate())
    results, left, again = [], [], ""
    for life in range(2):
        worker, _ = start(setup)
        results.append([train(worker, setup, number) for number in (0, 1)])
        where = f"{directory}/{life}"
        worker.save(where, step_at(2), background)
        worker.shutdown("the check is done")
        again = again or error_of(lambda worker=worker: worker.shutdown("once more"))  # type: ignore[misc]
        left += [thread.name for thread in threading.enumerate() if thread not in before and not thread.daemon]
        left += ["a process group"] if torch.distributed.is_initialized() else []
        left += [] if written_ranks(Path(where)) == 1 else ["a checkpoint that is not whole"]
    return Lives(results=results, left=left, shutdown_again=again)
