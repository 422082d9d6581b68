"""The plain backend with checks of its caller: drivers, hosts and the suite all use this one.

Hooks must come in order, steps one by one, with memory awake, versions increasing, and micro-batches well-formed and
unchanged until the call returns. A ContractError names the violation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set

import numpy as np
from attrs import evolve

from corerl.config import RoleConfig
from corerl.errors import ContractError
from corerl.plugin import Context
from corerl.plugin.hooks import VERBS
from corerl.types import (
    Array,
    ForwardResult,
    GradientResult,
    InitResult,
    LossSpec,
    MemoryKind,
    MicroBatch,
    Output,
    PackedBatch,
    SaveResult,
    SleepResult,
    Step,
    StepResult,
    UpdateResult,
    WakeResult,
)
from corerl.weights import WeightSender
from corerl_testing.plain.backend import PlainBackend


class StrictPlainBackend(PlainBackend):
    """The plain backend, but it checks its caller and raises ContractError."""

    life = "new"  # then "ready", finally "ended"
    awake: frozenset[MemoryKind] = frozenset()
    next_step = 0  # the optimizer step that must come next
    skipped = False  # the last step was not applied, and may be repeated
    has_gradients = complete = False  # gradients wait for their step; no more are to come
    next_version = 0  # the smallest version that is allowed next

    def init(self, config: RoleConfig, context: Context) -> InitResult:
        _owed(self.life == "new", f"init was called on a backend in state {self.life!r}")
        _owed(0 <= context.rank < context.world_size, f"got rank {context.rank} of {context.world_size} ranks")
        result = super().init(config, context)
        self.life, self.awake = "ready", frozenset(MemoryKind)
        self.next_step, self.next_version = result.optimizer_step, result.weights_version
        return result

    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        self._ready("forward_backward")
        _owed(not self.complete, "forward_backward was called after the step's last call")
        _owed(batch.count > 0, "forward_backward was called without a micro-batch")
        _owed(self._computes().issuperset(outputs), f"forward_backward was asked for {list(map(str, outputs))}")
        self.has_gradients, self.complete = True, last
        left_alone = LeftAlone(batch)
        result = super().forward_backward(evolve(batch, micro_batches=left_alone), loss, outputs, last)
        left_alone.check("forward_backward")
        return result

    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        self._ready("optimizer_step")
        _owed(self.has_gradients, "optimizer_step was called without gradients")
        self._in_step("optimizer_step", step, again=self.skipped)
        _owed(math.isfinite(step.lr) and step.lr >= 0, f"optimizer_step was given the learning rate {step.lr}")
        _owed(math.isfinite(scale) and scale > 0, f"optimizer_step was given the scale {scale}")
        result = super().optimizer_step(step, scale)
        self.has_gradients = self.complete = False
        self.next_step, self.skipped = step.optimizer_step + 1, not result.applied
        return result

    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...]) -> ForwardResult:
        self._ready("forward")
        possible = self._computes()
        if self.routers.layers and not self.config.value_head:
            possible.add(Output.ROUTED_EXPERTS)
        _owed(bool(outputs) and possible.issuperset(outputs), f"forward was asked for {list(map(str, outputs))}")
        left_alone = LeftAlone(batch)
        result = super().forward(evolve(batch, micro_batches=left_alone), outputs)
        left_alone.check("forward")
        return result

    def update_weights(self, sender: WeightSender, version: int, adapters: bool) -> UpdateResult:
        self._ready("update_weights")
        _owed(
            version >= self.next_version,
            f"update_weights was given version {version}, expected {self.next_version} or more",
        )
        self.next_version = version + 1  # an attempted version counts as used, even if it fails
        return super().update_weights(sender, version, adapters)

    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        self._ready("save")
        _owed(not self.has_gradients, "save was called while gradients wait for their step")
        self._in_step("save", step)
        return super().save(path, step, background)

    def sleep(self, kinds: Set[MemoryKind]) -> SleepResult:
        self._ready("sleep")
        _owed(kinds <= self.awake, f"sleep was given kinds that are already asleep: {_names(kinds - self.awake)}")
        _owed(
            not (self.has_gradients and MemoryKind.GRAD in kinds), "sleep was given gradients that wait for their step"
        )
        self.awake -= kinds
        return super().sleep(kinds)

    def wake_up(self, kinds: Set[MemoryKind]) -> WakeResult:
        self._ready("wake_up")
        _owed(not kinds & self.awake, f"wake_up was given kinds that are already awake: {_names(kinds & self.awake)}")
        result = super().wake_up(kinds)
        self.awake |= kinds
        return result

    def shutdown(self, reason: str) -> None:
        _owed(self.life != "ended", "shutdown was called twice")
        was, self.life = self.life, "ended"
        if was == "ready":  # without init there is nothing to shut down
            super().shutdown(reason)

    def _computes(self) -> set[Output]:
        return {Output.VALUES} if self.config.value_head else {Output.LOGPROBS, Output.ENTROPY}

    def _ready(self, hook: str) -> None:
        _owed(self.life == "ready", f"{hook} was called on a backend in state {self.life!r}")
        asleep = VERBS[hook].needs - self.awake
        _owed(not asleep, f"{hook} was called while these are asleep: {_names(asleep)}")

    def _in_step(self, hook: str, step: Step, *, again: bool = False) -> None:
        allowed = [self.next_step - 1] * again + [self.next_step]
        _owed(
            step.optimizer_step in allowed,
            f"{hook} was given optimizer step {step.optimizer_step}, expected {' or '.join(map(str, allowed))}",
        )


class LeftAlone(Iterable[MicroBatch]):
    """Checks that a call's micro-batches are well-formed and as many as announced, and with `check` that they did not
    change."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch
        self.given: list[tuple[MicroBatch, Mapping[str, Array]]] = []  # each with copies of its arrays

    def __iter__(self) -> Iterator[MicroBatch]:
        self.given.clear()
        for micro in self.batch.micro_batches:
            _owed(not (flaw := _flaw(micro)), f"micro-batch {len(self.given)} is malformed: {flaw}")
            self.given.append((micro, {name: array.copy() for name, array in _arrays(micro).items()}))
            yield micro
        found = len(self.given)
        _owed(found == self.batch.count, f"got {found} micro-batches, but {self.batch.count} were announced")

    def check(self, hook: str) -> None:
        for index, (micro, copies) in enumerate(self.given):
            for name, array in _arrays(micro).items():
                same = array.tobytes() == copies[name].tobytes()
                _owed(same, f"{name} of micro-batch {index} was changed during {hook}")


def _flaw(micro: MicroBatch) -> str:
    """Why a micro-batch is not well-formed; "" if it is."""
    padded, tokens = np.diff(micro.cu_seqlens), len(micro.tokens)
    if micro.cu_seqlens[0] != 0 or micro.cu_seqlens[-1] != tokens:
        return f"cu_seqlens go from {micro.cu_seqlens[0]} to {micro.cu_seqlens[-1]}, expected 0 to {tokens}"
    if not len(micro.lengths) == len(micro.rows) == len(padded):
        return f"{len(micro.lengths)} lengths and {len(micro.rows)} rows for {len(padded)} sequences"
    if (micro.lengths < 1).any() or (micro.lengths > padded).any():
        return f"lengths {micro.lengths.tolist()} do not fit into {padded.tolist()}"
    positions = np.arange(tokens) - np.repeat(micro.cu_seqlens[:-1], padded)
    if not np.array_equal(micro.positions, positions):
        return "positions do not start at 0 in every sequence"
    if (prefixes := micro.prefix_lengths) is not None:
        if len(prefixes) != len(padded) or prefixes[0] or (micro.lengths != padded).any():
            return f"prefix_lengths is {prefixes.tolist()}, for sequences of {micro.lengths.tolist()} tokens"
        sequences = np.split(micro.tokens, micro.cu_seqlens[1:-1])
        for count, before, sequence in zip(prefixes[1:], sequences[:-1], sequences[1:], strict=True):
            if not np.array_equal(before[:count], sequence[:count]) or count > len(sequence):
                return f"a sequence does not begin with {count} tokens of the one before it, as prefix_lengths says"
    for name, column in micro.columns.items():
        if len(column) != tokens:
            return f"column {name!r} has {len(column)} entries for {tokens} tokens"
    if "weights" in micro.columns:
        of_no_sample = (positions >= np.repeat(micro.lengths, padded)) | (np.repeat(micro.rows, padded) < 0)
        if micro.columns["weights"][of_no_sample | (positions == 0)].any():
            return "weights are not 0 in padding, in a filler, or on a first token, which nothing predicts"
    return ""


def _arrays(micro: MicroBatch) -> dict[str, Array]:
    own = {name: getattr(micro, name) for name in ("tokens", "positions", "cu_seqlens", "lengths", "rows")}
    prefixes = {} if micro.prefix_lengths is None else {"prefix_lengths": micro.prefix_lengths}
    return {**own, **micro.columns, **prefixes}


def _names(kinds: Set[MemoryKind]) -> str:
    return ", ".join(sorted(kinds))


def _owed(kept: bool, broken: str) -> None:
    if not kept:
        raise ContractError(f"the caller broke the contract: {broken}")
