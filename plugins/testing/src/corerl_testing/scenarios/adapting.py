"""Train adapters, and note what the role holds."""

from __future__ import annotations

from attrs import frozen

from corerl.backend.primitives import StateKey
from corerl.weights.adapters import is_adapter
from corerl_testing.harness import Setup, running, train
from corerl_testing.scenarios.sleeping import alive

FLOAT32 = 4
COPIES = 8  # of the adapters, in float32: working copy, master, gradient, moments, and room for padding and buckets
ROOM = 2**16  # bytes for buffers of tiny models


@frozen(kw_only=True)
class Adapted:
    precisions: set[str]  # of the weights beside adapters
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
