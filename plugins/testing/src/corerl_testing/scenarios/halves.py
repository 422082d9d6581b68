"""Take steps whose gradients come in several calls, on one rank, and report their effects."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attrs import evolve, frozen

from corerl.backend import StateKey
from corerl.data.packing import count_loss_tokens
from corerl.trainer.worker import Worker
from corerl.types import ForwardResult, MemoryKind, Output, PackedBatch, SampleBatch, TrainResult
from corerl_testing.harness import (
    Setup,
    error_of,
    forward,
    parts_of_step,
    running,
    samples_at,
    start,
    state_of,
    step_at,
    train,
)
from corerl_testing.inprocess import InProcessSender
from corerl_testing.scenarios.states import Fault, failing
from corerl_testing.scenarios.training import Skipped, Trained, skip_a_step, taken

PARTS = 2  # calls of a step, each of one group or two

Between = Callable[[Worker, int], None]


def take_step(
    worker: Worker,
    setup: Setup,
    number: int,
    *,
    announced: bool,
    unit: float = 0.0,
    samples: SampleBatch | None = None,
    between: Between = lambda worker, call: None,
) -> TrainResult:
    """Step `number` in PARTS calls, among them one without samples. `announced`: the last one is said to be so. Weights
    are over `unit`, or if it is 0 over the step's denominator, so that the step's scale is 1. `between` is called after
    each call."""
    given = samples or samples_at(number)
    unit = unit or float(count_loss_tokens(given).sum())
    batches, denominator = parts_of_step(worker, setup, given, PARTS, unit=unit)
    empty = PackedBatch(micro_batches=(), count=0)
    for call, batch in enumerate((empty, *batches)):
        worker.add_gradients(batch, setup.loss, last=announced and call == PARTS)
        between(worker, call)
    return worker.optimizer_step(step_at(number), unit / denominator)


def train_in_calls(setup: Setup, steps: int, announced: bool, unit: float = 0.0, visit: str = "") -> Trained:
    """Train the first steps in several calls each. `visit` is what is done between them: "pass" uses the model without
    training, "sleep" lets all but gradients sleep."""
    worker, init = start(setup)
    if visit == "pass":
        worker.create_snapshot("start")
    between = {"pass": pass_through, "sleep": doze}[visit] if visit else unmoved(worker)
    return taken(
        worker,
        init,
        range(steps),
        lambda number: take_step(worker, setup, number, announced=announced, unit=unit, between=between),
    )


def unmoved(worker: Worker) -> Between:
    """Fails where a call of the first step moves weights."""
    before = state_of(worker, (StateKey.MASTER,))[StateKey.MASTER]

    def look(worker: Worker, call: int) -> None:
        if worker.backend.adam_step:
            return
        after = state_of(worker, (StateKey.MASTER,))[StateKey.MASTER]
        moved = [now.name for was, now in zip(before, after, strict=True) if (was.values != now.values).any()]
        if moved:
            raise AssertionError(
                f"forward_backward moved {moved[0]}, and {len(moved) - 1} others: only optimizer_step may"
            )

    return look


def pass_through(worker: Worker, call: int) -> None:
    """Forward passes under the weights and under a snapshot, and a weight update: none touches gradients."""
    setup = Setup(backend="", model="")
    forward(worker, setup, samples_at(5))
    forward(worker, setup, samples_at(5), snapshot="start")
    worker.host.update_weights(InProcessSender(lambda bucket: None), version=worker.backend.weights_version + 1)


def doze(worker: Worker, call: int) -> None:
    others = frozenset(MemoryKind) - {MemoryKind.GRAD}
    worker.sleep(others)
    worker.wake_up(others)


def refused_between(setup: Setup, directory: str) -> tuple[dict[str, str], TrainResult]:
    """What may not come between the halves of step 0, and the step after all that."""
    with running(setup) as worker:
        early = error_of(lambda: worker.optimizer_step(step_at(0), 1.0))

        def between(worker: Worker, call: int) -> None:
            if call != PARTS:
                return
            refused.update(
                {
                    "save": error_of(lambda: worker.save(directory, step_at(0), False)),
                    "sleep": error_of(lambda: worker.sleep({MemoryKind.GRAD})),
                    "forward_backward": error_of(lambda: train(worker, setup, 0)),
                }
            )

        refused = {"optimizer_step": early}
        return refused, take_step(worker, setup, 0, announced=True, between=between)


def skip_a_step_in_calls(setup: Setup) -> Skipped:
    """All steps in calls, the first of which has the NaN advantages."""
    return skip_a_step(setup, partial(take_step, announced=False))


@frozen(kw_only=True)
class Returned:
    """Outputs of one call's samples, from the rank's share."""

    trained: ForwardResult | None  # of the training pass
    passed: ForwardResult  # of a forward pass under the same weights


def outputs_of_training(setup: Setup, samples: SampleBatch, outputs: tuple[Output, ...]) -> Returned:
    with running(setup) as worker:
        (batch,), _ = parts_of_step(worker, setup, samples, 1, unit=1.0)
        passed = forward(worker, setup, samples, outputs=outputs)
        found = worker.host.forward_backward(batch, setup.loss, outputs, True)
        return Returned(trained=found.outputs, passed=passed)


def fail_in_the_second_call(setup: Setup) -> dict[str, str]:
    """Verb -> its error, after one call that adds gradients: of the call that fails, and of all verbs that follow."""
    worker, _ = start(setup)
    second, first = parts_of_step(worker, setup, samples_at(0), PARTS, unit=1.0)[0]  # of several micro-batches
    worker.add_gradients(first, setup.loss, last=False)
    broken = failing(evolve(second, micro_batches=list(second.micro_batches)), Fault("no such batch"))
    errors = {
        "second": error_of(lambda: worker.add_gradients(broken, setup.loss, last=True)),
        "optimizer_step": error_of(lambda: worker.optimizer_step(step_at(0), 1.0)),
        "forward": error_of(lambda: forward(worker, setup, samples_at(0))),
    }
    worker.shutdown("the check is done")
    return errors
