"""Send weights to an engine that works, and to one that fails."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen

from corerl.types import (
    Array,
    UpdateResult,
)
from corerl.weights import Bucket
from corerl_testing.allocations import Allocations
from corerl_testing.harness import (
    Setup,
    State,
    error_of,
    running,
    start,
    state_of,
    step_at,
    train,
)
from corerl_testing.inprocess import InProcessSender


@frozen(kw_only=True)
class Pushed:
    result: UpdateResult
    names: list[str]  # in the order of arrival on this rank
    tensors: dict[str, Array]
    state: State
    refused: str  # the error of sending the same version again
    arrived_after: int  # number of tensors that arrived with it
    tensors_then: dict[str, Array]  # those of the next version, after one more step
    state_then: State


class EveryRankSender(InProcessSender):
    """Sends from every rank, as for an engine with a part on each: all ranks must hold each bucket."""

    def sending_rank(self, bucket: Bucket) -> int | None:
        return None


def push_weights(setup: Setup, every_rank: bool) -> Pushed:
    """Train two steps, then send all weights to an engine in the process of each sending rank; repeat after another
    step."""
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
        refused = error_of(lambda: worker.host.update_weights(make(receive), 1))
        arrived_after = len(names) - arrived
        first, state = dict(tensors), state_of(worker)
        tensors.clear()
        train(worker, setup, 2)
        worker.host.update_weights(make(receive), 2)
        return Pushed(
            result=result,
            names=names[:arrived],
            tensors=first,
            state=state,
            refused=refused,
            arrived_after=arrived_after,
            tensors_then=tensors,
            state_then=state_of(worker),
        )


@frozen(kw_only=True)
class PushedWatched:
    """What the first update allocates, including memory that later updates reuse; the engine keeps no tensors."""

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
    names: list[str]  # tensors that it received
    wanted: list[str]


class FailingSender(InProcessSender):
    """A sender to an engine that fails at its second bucket."""

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
    """The version that a resumed worker reports, and its error for an older one."""
    with running(setup) as worker:
        worker.host.update_weights(InProcessSender(lambda bucket: None), 7)
        worker.save(directory, step_at(0), False)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # every rank has written before any reads
    worker, init = start(setup, resume=directory)
    refused = error_of(lambda: worker.host.update_weights(InProcessSender(lambda bucket: None), 6))
    worker.shutdown("the check is done")
    return init.weights_version, refused
