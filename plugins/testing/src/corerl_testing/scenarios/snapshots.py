"""Create, load and use snapshots."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen

from corerl.types import (
    Array,
    ForwardResult,
    SampleBatch,
    TrainResult,
)
from corerl_testing.harness import (
    Setup,
    State,
    error_of,
    forward,
    packed_for_training,
    running,
    state_of,
    train,
)
from corerl_testing.inprocess import InProcessSender
from corerl_testing.scenarios.states import Fault, failing


@frozen(kw_only=True)
class Snapshotted:
    first: ForwardResult  # of the weights that the snapshot was made from
    kept: ForwardResult  # of the snapshot, three steps later
    started_from: ForwardResult  # of a snapshot of the run's initial weights
    other: ForwardResult  # of a snapshot loaded from another directory
    sent: Mapping[str, Array]  # to an engine in the process of each sending rank, of that snapshot
    current: ForwardResult
    before: State  # before the snapshots are used
    after: State
    then: TrainResult  # of a step after that
    failed: str  # the error of an interrupted pass through a snapshot; only on a single rank
    dropped: str  # the error on using a snapshot that was dropped


def use_snapshots(setup: Setup, samples: SampleBatch, other: str) -> Snapshotted:
    sent: dict[str, Array] = {}

    def keep(bucket: Mapping[str, torch.Tensor]) -> None:
        sent.update({name: value.float().cpu().numpy().copy() for name, value in bucket.items()})

    with running(setup) as worker:
        first = forward(worker, setup, samples)
        worker.create_snapshot("reference")
        for number in range(3):
            train(worker, setup, number)
        before = state_of(worker)
        kept = forward(worker, setup, samples, snapshot="reference")
        worker.load_snapshot("start", "")
        worker.load_snapshot("other", other)
        started_from = forward(worker, setup, samples, snapshot="start")
        of_other = forward(worker, setup, samples, snapshot="other")
        worker.host.update_weights(InProcessSender(keep), 1, snapshot="other")
        failed = ""
        if worker.context.world_size == 1:  # other ranks would wait in mid-pass for one that has left it
            batch = failing(packed_for_training(worker, setup, samples), Fault("no such batch"))
            failed = error_of(
                lambda: worker.host.forward(batch=batch, outputs=setup.loss.outputs, snapshot="reference")
            )
        after = state_of(worker)
        current = forward(worker, setup, samples)
        worker.drop_snapshot("reference")
        dropped = error_of(lambda: forward(worker, setup, samples, snapshot="reference"))
        return Snapshotted(
            first=first,
            kept=kept,
            started_from=started_from,
            other=of_other,
            sent=sent,
            current=current,
            before=before,
            after=after,
            then=train(worker, setup, 3),
            failed=failed,
            dropped=dropped,
        )
