"""Run optimizer steps and forward passes on one rank, and report their effects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from attrs import evolve, field, frozen

from corerl.backend import StateKey
from corerl.trainer.worker import Worker
from corerl.types import (
    AdamSettings,
    Array,
    ForwardResult,
    InitResult,
    LossSpec,
    MicroBatch,
    Output,
    SampleBatch,
    TrainResult,
)
from corerl_testing.harness import (
    LIKELIHOOD,
    LOSS,
    Setup,
    State,
    forward,
    packed_for_training,
    running,
    samples_at,
    start,
    state_of,
    step_at,
    train,
    with_targets,
)
from corerl_testing.require import require_equal

EXPERTS = Output.ROUTED_EXPERTS.value
WEIGHTED = LossSpec(name="weighted_logprobs")
FIRST = (StateKey.MASTER, StateKey.EXP_AVG)


@frozen(kw_only=True)
class Trained:
    """One rank's report of some optimizer steps."""

    init: InitResult
    at_start: State
    results: list[TrainResult]
    state: State  # at the end
    adam_step: int
    first: State = field(factory=dict)  # masters and first moments after the first of several steps


def train_steps(
    setup: Setup, numbers: Sequence[int], resume: str = "", save_after: int = -1, save_to: str = ""
) -> Trained:
    """Train steps `numbers`; after step `save_after`, save the rank's part of a checkpoint to `save_to`."""
    worker, init = start(setup, resume=resume)

    def take(number: int) -> TrainResult:
        result = train(worker, setup, number)
        if number == save_after:
            saved = worker.save(save_to, step_at(number + 1), False)
            what = "the list of path and complete in the SaveResult of a save in the foreground"
            require_equal(what, (saved.path, saved.complete), (save_to, True))
        return result

    return taken(worker, init, numbers, take)


def taken(worker: Worker, init: InitResult, numbers: Sequence[int], take: Callable[[int], TrainResult]) -> Trained:
    """Take each of these steps, and shut the worker down."""
    at_start = state_of(worker)
    results: list[TrainResult] = []
    first: State = {}
    for number in numbers:
        results.append(take(number))
        if len(results) == 1 and len(numbers) > 1:
            first = state_of(worker, FIRST)
    report = Trained(
        init=init,
        at_start=at_start,
        results=results,
        state=state_of(worker),
        adam_step=worker.backend.adam_step,
        first=first,
    )
    worker.shutdown("the check is done")
    return report


# Of the config each changes something, and the last nothing: what a step before has set must not hold.
SETTINGS = (
    AdamSettings(betas=(0.3, 0.6), clip_norm=0.05),
    AdamSettings(eps=1e-2, weight_decay=20.0, clip_norm=0.0),
    AdamSettings(betas=(0.0, 0.9), weight_decay=0.0),
    None,
)


def train_with(
    setup: Setup,
    settings: Sequence[AdamSettings | None],
    samples: Callable[[int], SampleBatch] = samples_at,
) -> Trained:
    """Train a step with each of these settings of Adam and of clipping, on `samples` of its number."""
    worker, init = start(setup)

    def take(number: int) -> TrainResult:
        return train(worker, setup, number, samples=samples(number), adam=settings[number])

    return taken(worker, init, range(len(settings)), take)


def train_on_targets(setup: Setup, steps: int) -> Trained:
    """Train steps on log-probs of several targets at each token."""
    worker, init = start(setup)

    def take(number: int) -> TrainResult:
        batch = packed_for_training(worker, setup, with_targets(samples_at(number), 3))
        return worker.train_on(batch, WEIGHTED, step_at(number))

    return taken(worker, init, range(steps), take)


def first_step(setup: Setup, samples: SampleBatch) -> Trained:
    """Take one step of maximum likelihood on these samples."""
    worker, init = start(setup)

    def take(number: int) -> TrainResult:
        batch = packed_for_training(worker, setup, samples)
        return worker.train_on(batch=batch, loss=LIKELIHOOD, step=step_at(number))

    return taken(worker, init, [0], take)


def forward_only(setup: Setup, samples: SampleBatch) -> ForwardResult:
    with running(setup) as worker:
        return forward(worker, setup, samples)


@frozen(kw_only=True)
class Replayed:
    chosen: ForwardResult  # log-probs and experts, if the routers choose
    given: ForwardResult  # the same, if the experts are given
    result: TrainResult  # of a step through the given experts
    state: State  # after that step
    chosen_after: ForwardResult
    given_after: ForwardResult


def replay_experts(setup: Setup, samples: SampleBatch, lr: float) -> Replayed:
    """Replay the experts in the column `routed_experts` of `samples`."""
    free = evolve(samples, columns={name: samples.columns[name] for name in samples.columns if name != EXPERTS})
    with running(setup) as worker:

        def passed(samples: SampleBatch) -> ForwardResult:
            return forward(worker, setup, samples, outputs=(Output.LOGPROBS, Output.ROUTED_EXPERTS))

        chosen, given = passed(free), passed(samples)
        batch = packed_for_training(worker, setup, samples)
        result = worker.train_on(batch=batch, loss=LIKELIHOOD, step=evolve(step_at(0), lr=lr))
        return Replayed(
            chosen=chosen,
            given=given,
            result=result,
            state=state_of(worker),
            chosen_after=passed(free),
            given_after=passed(samples),
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


def skip_a_step(setup: Setup, take: Callable[..., TrainResult] = train) -> Skipped:
    """Train steps 0 and 1, then a step whose first sample has NaN advantages, then step 2, each as `take` does."""
    with running(setup) as worker:
        for number in (0, 1):
            take(worker, setup, number)
        before, steps_before = state_of(worker), worker.backend.adam_step
        samples = samples_at(1)
        advantages = samples.columns["advantages"].copy()
        advantages[: samples.offsets[1]] = np.nan
        result = take(worker, setup, 2, samples=samples.with_columns(advantages=advantages))
        after, steps_after = state_of(worker), worker.backend.adam_step
        then = take(worker, setup, 2)
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
    """Train one step on these samples."""
    with running(setup) as worker:
        return train(worker, setup, 0, samples=samples)


@frozen(kw_only=True)
class Moved:
    before: State
    result: TrainResult  # of the last step
    after: State


def train_slowly(setup: Setup, steps: int, lr: float) -> Moved:
    """Train `steps` steps at the constant learning rate `lr`."""
    with running(setup) as worker:
        before = state_of(worker)
        for number in range(steps):
            batch = packed_for_training(worker, setup, samples_at(number))
            result = worker.train_on(batch=batch, loss=setup.loss, step=evolve(step_at(number), lr=lr))
        return Moved(before=before, result=result, after=state_of(worker))


def train_on_nothing(setup: Setup) -> Moved:
    """Train the first step, with weight 0 on every token."""
    with running(setup) as worker:
        before, samples = state_of(worker), samples_at(0)
        nothing = samples.with_columns(loss_mask=np.zeros_like(samples.columns["loss_mask"]))
        result = train(worker, setup, 0, samples=nothing)
        return Moved(before=before, result=result, after=state_of(worker))


@frozen(kw_only=True)
class Overfitted:
    before: ForwardResult
    after: ForwardResult
    losses: list[float]  # of this rank


def overfit(setup: Setup, samples: SampleBatch, steps: int, lr: float) -> Overfitted:
    """Train many steps on one batch, with a loss that is not one of CoreRL's."""
    with running(setup) as worker:
        before = forward(worker, setup, samples)
        batch = packed_for_training(worker, setup, samples)
        results = [
            worker.train_on(batch=batch, loss=LIKELIHOOD, step=evolve(step_at(number), lr=lr))
            for number in range(steps)
        ]
        losses = [result.metrics["loss"].value for result in results]
        return Overfitted(before=before, after=forward(worker, setup, samples), losses=losses)


def train_on_garbage(setup: Setup, samples: SampleBatch, *, seed: int = 0) -> TrainResult:
    """Train one step with random tokens and columns in padding and fillers."""
    rng = np.random.default_rng(seed)
    with running(setup) as worker:
        batch = packed_for_training(worker, setup, samples)
        changed = []
        for micro in batch.micro_batches:
            padding = np.ones(len(micro.tokens), dtype=np.bool_)
            for sequence, (start, length) in enumerate(zip(micro.cu_seqlens[:-1], micro.lengths, strict=True)):
                padding[start : start + length] = micro.rows[sequence] < 0
            tokens = np.where(padding, rng.integers(3, 97, len(padding)), micro.tokens)
            columns = {
                name: column
                if name == "weights"
                else np.where(padding, rng.normal(0.0, 3.0, len(padding)), column).astype(column.dtype)
                for name, column in micro.columns.items()
            }
            changed.append(evolve(micro, tokens=tokens, columns=columns))
        return worker.train_on(batch=evolve(batch, micro_batches=changed), loss=setup.loss, step=step_at(0))


def saved_for_backward(setup: Setup, number: int) -> tuple[TrainResult, int]:
    """Train a step; also returns the most bytes of tensors saved at once for the backward pass, by its own forward pass
    and one before it."""
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
        forward(worker, setup, samples_at(number))  # as before every step of a run
        return train(worker, setup, number), most


def changed_in_batches(setup: Setup) -> list[str]:
    """Train, then forward, on read-only arrays as from the object store; returns what was changed."""
    with running(setup) as worker:
        batch = packed_for_training(worker, setup, samples_at(0))
        micro_batches = list(batch.micro_batches)
        for micro in micro_batches:
            for array in _arrays(micro).values():
                array.flags.writeable = False
        before = copy.deepcopy(micro_batches)
        batch = evolve(batch, micro_batches=micro_batches)
        worker.train_on(batch=batch, loss=LOSS, step=step_at(0))
        worker.host.forward(batch=batch, outputs=LOSS.outputs, snapshot="")
        if len(list(batch.micro_batches)) != len(before):
            return ["the list of micro-batches"]
        return [
            f"{name} of micro-batch {index}"
            for index, (now, then) in enumerate(zip(micro_batches, before, strict=True))
            for name, array in _arrays(now).items()
            if not np.array_equal(array, _arrays(then)[name])
        ]


def _arrays(micro: MicroBatch) -> dict[str, Array]:
    own = {name: getattr(micro, name) for name in ("tokens", "positions", "cu_seqlens", "lengths", "rows")}
    return {**own, **micro.columns}
