"""The data types exchanged between driver, workers, backends and engines, all of them frozen.

A row is one sequence of tokens. A sample is one of the G answers to a prompt: one row, or, if it is an episode of
several conversations, several rows.

Axes: N tokens of a rollout batch, B rows, E samples, T tokens of a micro-batch, S sequences of a micro-batch.

What a step is on its way: `GenerateRequest` (to an engine) and `Generation` (from it), `Rollout` (of the sampler),
`ScoredRollout` (with rewards), `SampleBatch` (its rows, here), `TrainBatch` (with advantages), `StepPlan` and its part
for a dp rank, `StepShard` (which rows make which micro-batch), `PackedBatch` of `MicroBatch`es (on a rank, here),
`DeviceBatch` (as tensors), and `LossInputs` (what a loss reads).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from attrs import Attribute, evolve, field, frozen
from numpy.typing import NDArray

from corerl.errors import ContractError, UserError
from corerl.kinds import MemoryKind as MemoryKind
from corerl.kinds import ModelSize as ModelSize
from corerl.pictures import Picture

Array = NDArray[Any]
IntArray = NDArray[np.int64]
UIntArray = NDArray[np.uint64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

Scalar = bool | int | float | str

OnProgress = Callable[[int, int], None]  # called with how many are done, and how many there are

PICTURE = "picture"  # column [N] int32 of batches with pictures: 1 + the picture that the token stands for, 0 for text
TARGETS = "targets"  # column [N] or [N, K] of token ids, of which LOGPROBS are, in place of the tokens themselves
ROLE = "role"  # row column of episodes that several roles play: [B] the name of the role that a row is of
TURN_REWARDS = "turn_rewards"  # column [N] of episodes: the reward of each turn at its last token, 0 elsewhere


class Output(StrEnum):
    """Per-token outputs that a model can compute; entry t always refers to token t."""

    # log p(token_t | tokens < t) of logits / temperature; with a column `targets`, of targets[t] in place of token_t,
    # in the shape of that column. 0 at sequence starts.
    LOGPROBS = "logprobs"
    ENTROPY = "entropy"  # of the distribution that token_t was sampled from; 0 at sequence starts
    VALUES = "values"  # value head on the hidden state at t - 1; 0 at sequence starts
    # [n, MoE layers, experts per token] integers: the experts that each of these layers routed token t through.
    ROUTED_EXPERTS = "routed_experts"


class Reduction(StrEnum):
    """How partial values of a metric are combined."""

    MEAN = "mean"  # sum(total) / sum(weight)
    SUM = "sum"
    LOSS = "loss"  # a sum with the loss's token weights, multiplied by the step's `scale` as its gradients are
    MAX = "max"
    MIN = "min"


@frozen
class Metric:
    """A partial metric: merged over micro-batches and output ranks, and divided only at the end."""

    total: float
    weight: float = 1.0
    reduction: Reduction = Reduction.MEAN

    def merge(self, other: Metric) -> Metric:
        if self.reduction is not other.reduction:
            raise ContractError(f"cannot merge a {self.reduction} metric with a {other.reduction} one")
        match self.reduction:  # numpy, as `max(0.0, nan)` is 0.0 in Python
            case Reduction.MAX:
                return Metric(float(np.maximum(self.total, other.total)), 1.0, self.reduction)
            case Reduction.MIN:
                return Metric(float(np.minimum(self.total, other.total)), 1.0, self.reduction)
            case _:
                return Metric(self.total + other.total, self.weight + other.weight, self.reduction)

    def scaled(self, scale: float) -> Metric:
        """As it is once the gradients have been multiplied by `scale`."""
        return evolve(self, total=self.total * scale) if self.reduction is Reduction.LOSS else self

    @property
    def value(self) -> float:
        """The final number; a mean over nothing is NaN."""
        if self.reduction is not Reduction.MEAN:
            return self.total
        return self.total / self.weight if self.weight else float("nan")


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of several ranks or micro-batches; equal names are combined by their reduction."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            try:
                merged[name] = merged[name].merge(metric) if name in merged else metric
            except ContractError as error:
                raise ContractError(
                    f"metric {name!r}: {error.message}; report it with the same reduction on all ranks"
                ) from None
    return merged


# ---- samples and batches ---------------------------------------------------------------------------------------------


def offsets_of(lengths: IntArray | Sequence[int]) -> IntArray:
    """[B + 1] offsets of concatenated rows of these lengths [B]: where each begins, and where the last ends."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def rows_at(offsets: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Select `rows` [n] of ragged data with `offsets` [B + 1]: their elements' indices and new offsets [n + 1]."""
    lengths = np.diff(offsets)[rows]
    picked = offsets_of(lengths)
    return np.arange(picked[-1]) + np.repeat(offsets[:-1][rows] - picked[:-1], lengths), picked


def only_shown(column: Array, pictures: Sequence[Picture]) -> tuple[Array, tuple[Picture, ...]]:
    """A column `picture` and its pictures, without those that no token stands for."""
    shown = np.unique(column[column > 0])
    number = np.zeros(len(pictures) + 1, np.int32)
    number[shown] = np.arange(1, len(shown) + 1)
    return number[column], tuple(pictures[each - 1] for each in shown)


def all_shown(parts: Sequence[tuple[Array, Sequence[Picture]]]) -> tuple[Array, tuple[Picture, ...]]:
    """The columns `picture` of several batches as one, and the pictures of all, each once."""
    if not any(pictures for _, pictures in parts):  # as in each turn of an episode without any
        return np.zeros(sum(len(column) for column, _ in parts), np.int32), ()
    place: dict[str, int] = {}
    every: list[Picture] = []
    columns = []
    for column, pictures in parts:
        for picture in pictures:
            if picture.id not in place:
                every.append(picture)
                place[picture.id] = len(every)
        columns.append(np.array([0, *(place[picture.id] for picture in pictures)], np.int32)[column])
    return np.concatenate([np.zeros(0, np.int32), *columns]), tuple(every)


def _are_targets(column: Array) -> bool:
    return column.dtype in (np.int32, np.int64) and column.ndim <= 2 and 0 not in column.shape[1:]


@frozen(kw_only=True)
class SampleBatch:
    """The rows of one rollout step as ragged arrays; workers read what they need of them in place, in the object store.

    Columns written by CoreRL itself, all [N] and 0 where `loss_mask` is False: `loss_mask` (the policy chose the
    token), `rollout_logprobs` (from the engine that sampled it), `versions` (of the weights that sampled it), `engines`
    (index of the engine that sampled it), `old_logprobs`, `ref_logprobs`, `advantages`. An algorithm may add its own.

    `routed_experts`, [N, MoE layers, experts per token], are the experts that the actor routes each token through,
    prompts included, instead of its routers' own choice; -1 where the routers choose.

    `targets`, [N] or [N, K] int32 or int64, are K tokens at each place whose log-probs are asked for instead of those
    of the row's own: log p(targets[t, k] | tokens < t). With it `Output.LOGPROBS` has its shape, in passes and in
    losses. At the first token of a row, and where the weight is 0, it may be any id.

    `picture` is there if rows show pictures: the tokens of each, up to its last placeholder, hold 1 + its index in
    `pictures`, in which each is once.

    A sample of several rows, an episode, has the same number `row_columns["episode"]` in each of them. Its rows share
    its reward, and each token that the policy chose is a loss token of exactly one of them. Where several roles play,
    `row_columns["role"]` names the role of each row, and what a role does in an episode is a sample of its own: its
    rows share a number `episode`, and all roles' samples their `group` and `sample`.
    """

    tokens: IntArray  # [N] prompt and response of each row, concatenated
    offsets: IntArray  # [B + 1] row b is tokens[offsets[b]:offsets[b + 1]]
    columns: Mapping[str, Array] = field(factory=dict)  # each [N, ...], aligned with tokens
    row_columns: Mapping[str, Array] = field(factory=dict)  # each [B, ...]: group, truncated, prompt_length, ...
    temperature: float = 1.0  # at which the samples were generated
    pictures: tuple[Picture, ...] = ()

    def __attrs_post_init__(self) -> None:
        bounds = self.offsets
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(self.tokens) or (np.diff(bounds) < 0).any():
            raise ValueError(f"offsets must increase from 0 to {len(self.tokens)} tokens, got {bounds.tolist()[:8]}")
        for name, column in self.columns.items():
            if len(column) != len(self.tokens):
                raise ValueError(f"column {name!r} has {len(column)} entries for {len(self.tokens)} tokens")
            if name == TARGETS and not _are_targets(column):
                raise ValueError(
                    f"column {name!r} is {column.dtype} {list(column.shape)}, expected int32 or int64, [N] or [N, K]"
                )
        mask = self.columns.get("loss_mask")
        if mask is not None and mask.dtype != np.bool_:  # with numbers, x[mask] would select elements 0 and 1
            raise ValueError(f"column 'loss_mask' is {mask.dtype}, expected bool; write mask.astype(bool)")
        for name, column in self.row_columns.items():
            if len(column) != len(self):
                raise ValueError(f"row column {name!r} has {len(column)} entries for {len(self)} rows")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def names(self) -> set[str]:
        """Of all columns and row columns."""
        return {*self.columns, *self.row_columns}

    @property
    def lengths(self) -> IntArray:
        """[B] number of tokens of each row."""
        return np.diff(self.offsets)

    @property
    def row_of(self) -> IntArray:
        """[N] the row of each token."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def episodes(self) -> tuple[IntArray, IntArray]:
        """[E] the row that stands for each sample, in ascending order; and [B] the sample of each row, as an index of
        these. A sample of several rows, an episode, is represented by the row of its last answer
        (`row_columns["final"]`) if that is there, else by its first. Without `row_columns["episode"]` every row is a
        sample of its own."""
        every = np.arange(len(self))
        if "episode" not in self.row_columns:
            return every, every
        final = self.row_columns.get("final", np.zeros(len(self), np.bool_))
        order = np.argsort(~final, kind="stable")  # the row that stands for a sample comes first of its rows
        _, first, number = np.unique(self.row_columns["episode"][order], return_index=True, return_inverse=True)
        stands_for = np.empty_like(every)  # [B] the row that stands for each row's sample
        stands_for[order] = order[first[number]]
        return np.unique(stands_for, return_inverse=True)

    @property
    def peers(self) -> IntArray:
        """[B] a number that rows share whose samples are compared: those of one prompt and, with roles, of one role."""
        groups = self.row_columns["group"]
        if ROLE not in self.row_columns:
            return groups
        roles, role_of = np.unique(self.row_columns[ROLE], return_inverse=True)
        return groups * len(roles) + role_of

    def take_rows(self, rows: IntArray) -> SampleBatch:
        """Only these rows [n], in this order."""
        rows = np.arange(len(self))[rows]
        # Run by run of neighbors: an index for every token would be as large as they, and take several times as long.
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if len(rows) else []
        spans = [slice(self.offsets[run[0]], self.offsets[run[-1] + 1]) for run in runs]

        def taken(values: Array) -> Array:
            return np.concatenate([values[span] for span in spans] or [values[:0]])

        columns = {name: taken(column) for name, column in self.columns.items()}
        pictures = self.pictures
        if PICTURE in columns:
            columns[PICTURE], pictures = only_shown(columns[PICTURE], pictures)
        return evolve(
            self,
            tokens=taken(self.tokens),
            offsets=offsets_of(self.lengths[rows]),
            columns=columns,
            row_columns={name: column[rows] for name, column in self.row_columns.items()},
            pictures=pictures,
        )

    @classmethod
    def concatenate(cls, parts: Sequence[SampleBatch]) -> SampleBatch:
        """Concatenate batches with the same columns, row columns and temperature."""
        first = parts[0]
        names = [name for name in first.columns if name != PICTURE]
        columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in names}
        pictures: tuple[Picture, ...] = ()
        if any(PICTURE in part.columns for part in parts):
            shown = [(part.columns.get(PICTURE, np.zeros(len(part.tokens), np.int32)), part.pictures) for part in parts]
            columns[PICTURE], pictures = all_shown(shown)
        return evolve(
            first,
            tokens=np.concatenate([part.tokens for part in parts]),
            offsets=offsets_of(np.concatenate([part.lengths for part in parts])),
            columns=columns,
            row_columns={
                name: np.concatenate([part.row_columns[name] for part in parts]) for name in first.row_columns
            },
            pictures=pictures,
        )

    def with_columns(self, **columns: Array) -> SampleBatch:
        return evolve(self, columns={**self.columns, **columns})

    def with_row_columns(self, **columns: Array) -> SampleBatch:
        return evolve(self, row_columns={**self.row_columns, **columns})


@frozen(kw_only=True)
class MicroBatch:
    """Packed sequences that go through the model together without attending to each other.

    The first prefix_lengths[s] tokens of sequence s are those of the one before it, so that a model may compute
    them once: what the model is given of them is the same, though their other columns may differ. There is then no
    padding.
    """

    tokens: IntArray  # [T]
    positions: IntArray  # [T] restart at 0 with every sequence
    cu_seqlens: IntArray  # [S + 1] sequence s is tokens[cu_seqlens[s]:cu_seqlens[s + 1]], padding included
    lengths: IntArray  # [S] without the padding required by ParallelLayout.sequence_multiple
    rows: IntArray  # [S] row of each sequence in the rollout batch; -1 for a filler
    columns: Mapping[str, Array] = field(factory=dict)  # each [T, ...]; `weights` already holds 1 / denominator
    prefix_lengths: IntArray | None = None  # [S]; None unless the rank's layout sets `shares_prefixes`


@frozen(kw_only=True)
class PackedBatch:
    """One rank's shard of a forward pass or an optimizer step. Backends must not mutate its contents."""

    micro_batches: Iterable[MicroBatch]  # may be lazy; equally many on every dp rank
    count: int  # of micro-batches
    temperature: float = 1.0  # divides the logits
    step_tokens: int = 0  # tokens of the whole optimizer step on all dp ranks, without padding; 0 if not known
    # The pictures that the micro-batches show, fillers included, by the numbers in their column `picture`.
    pictures: Mapping[int, Picture] = field(factory=dict)


# ---- the contract's arguments and results ----------------------------------------------------------------------------


def _allowed(fits: Callable[[Any], bool], wanted: str) -> Callable[[Any, Attribute[Any], Any], None]:
    """A validator of settings that may be None."""

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if value is not None and not fits(value):
            raise UserError(
                f"AdamSettings: {attribute.name}={value!r}, expected {wanted}; leave it out to keep the config's"
            )

    return check


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _are_decays(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(_finite(beta) and 0 <= beta < 1 for beta in value)


_decays = _allowed(_are_decays, "two numbers, each at least 0 and below 1")
_above_zero = _allowed(lambda value: _finite(value) and value > 0, "a finite number above 0")
_not_negative = _allowed(lambda value: _finite(value) and value >= 0, "a finite number that is at least 0")


@frozen(kw_only=True)
class AdamSettings:
    """What one step sets of `[train.optimizer]`, by the same names; None keeps the config's value. Raises UserError."""

    # Bias correction is by the step's own betas, and counts all applied steps.
    betas: tuple[float, float] | None = field(default=None, validator=_decays)
    eps: float | None = field(default=None, validator=_above_zero)
    weight_decay: float | None = field(default=None, validator=_not_negative)  # of the same tensors as the config's
    clip_norm: float | None = field(default=None, validator=_not_negative)  # 0 does not clip


@frozen(kw_only=True)
class Step:
    """The position of training. Do not confuse its two counters with each other or with the weights version."""

    optimizer_step: int  # counts calls of `optimizer_step`, from 0, skipped steps included
    rollout_step: int  # counts rollout batches, from 0
    lr: float  # of this step, from core's schedule
    adam: AdamSettings | None = None  # of this step alone, in place of the config's; needs the capability `adam`


@frozen(kw_only=True)
class LossSpec:
    """A loss as data, resolved once in each worker."""

    name: str  # registered, or "module:function"
    params: Mapping[str, Scalar] = field(factory=dict)
    outputs: tuple[Output, ...] = (Output.LOGPROBS,)  # the model outputs it needs


@frozen(kw_only=True)
class ParallelLayout:
    """What the driver needs to know about a rank to give it work."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    outputs: bool = True  # this rank returns metrics and per-token outputs
    sequence_multiple: int = 1  # every sequence is padded to a multiple of this (2 x cp; tp with sequence parallel)
    micro_batch_multiple: int = 1  # the number of micro-batches is a multiple of this (interleaved pipelines)
    # Sequences are padded to the longest of their micro-batch, so that they should have similar lengths; the padding
    # counts as tokens of the micro-batch.
    rectangular: bool = False
    # Sequences of a group that begin alike follow each other in a micro-batch, which says so in `prefix_lengths` and
    # counts the tokens in common once. Not together with `rectangular` or a `sequence_multiple`.
    shares_prefixes: bool = False

    def __attrs_post_init__(self) -> None:
        if self.shares_prefixes and (self.rectangular or self.sequence_multiple != 1):
            raise ContractError(
                f"a layout has shares_prefixes together with rectangular={self.rectangular} and sequence_multiple="
                f"{self.sequence_multiple}, expected False and 1: sequences that share tokens are not padded; declare "
                "'shared-prefixes' as missing, or refuse train.share_prefixes for such models"
            )

    @classmethod
    def data_parallel(cls, *, rank: int, world_size: int, **more: bool) -> ParallelLayout:
        """The layout of plain data parallelism: every rank gets its own samples. `more` are fields such as
        `rectangular`."""
        return cls(rank=rank, world_size=world_size, dp_rank=rank, dp_size=world_size, **more)


@frozen(kw_only=True)
class InitResult:
    """What a rank reports of `init`."""

    layout: ParallelLayout
    optimizer_step: int = 0  # the next step
    weights_version: int = 0  # of the loaded weights


@frozen(kw_only=True)
class ForwardResult:
    """Per-token outputs of this rank's samples; empty on non-output ranks."""

    rows: IntArray  # [S] indices of rows in the rollout batch, in the order given
    offsets: IntArray  # [S + 1] into each output
    outputs: Mapping[Output, Array]  # each [n, ...]: float32, except experts, which are integers

    @classmethod
    def empty(cls, wanted: Iterable[Output]) -> ForwardResult:
        """Of no samples."""
        nothing = np.zeros(0, np.float32)
        return cls(rows=np.zeros(0, np.int64), offsets=np.zeros(1, np.int64), outputs=dict.fromkeys(wanted, nothing))


@frozen(kw_only=True)
class GradientResult:
    """What a rank reports of one `forward_backward`."""

    # This rank's part. Of a rank that does not set `outputs` in its layout, the host drops all of it.
    metrics: Mapping[str, Metric]
    tokens: int  # that went through the model
    outputs: ForwardResult | None = None  # if any were requested


@frozen(kw_only=True)
class StepResult:
    """What a rank reports of one `optimizer_step`."""

    applied: bool  # False: the gradient was not finite and nothing changed; equal on all ranks
    grad_norm: float  # before clipping, over the whole model, of the gradients times `scale`
    metrics: Mapping[str, Metric] = field(factory=dict)  # of the step itself, such as a loss scale


@frozen(kw_only=True)
class TrainResult:
    """One optimizer step with all that led to it, on a rank or over all ranks of a group."""

    applied: bool
    metrics: Mapping[str, Metric]
    grad_norm: float
    tokens: int
    compilations: int = 0  # graphs that torch.compile has made since the last step, on the rank with the most


@frozen(kw_only=True)
class UpdateResult:
    """What a rank reports of one weight update."""

    bytes: int  # sent by this rank
    seconds: float
    engines: Mapping[str, str] = field(factory=dict)  # engine -> why it lacks buckets; "" if it has all
    sums: Mapping[str, int] = field(factory=dict)  # HF tensor -> sum of its sent bit patterns, if requested


@frozen(kw_only=True)
class SaveResult:
    """What a rank reports of one checkpoint."""

    path: str
    bytes: int  # written, or staged, by this rank
    complete: bool  # False while a background save is still writing


@frozen(kw_only=True)
class SleepResult:
    """What a rank has released."""

    freed_bytes: int  # of the storages of these kinds
    # Still in use according to the GPU driver: by this process if it tells processes apart, else on the whole device.
    residual_bytes: int
    driver_freed_bytes: int = 0  # by how much that fell, including torch's caches
    used_bytes: int = 0  # on the device by all processes, when the sleep began and caches were largest
    total_bytes: int = 0  # that the device has; 0 for main memory
    notes: tuple[str, ...] = ()  # for the user, such as why host memory is not pinned


@frozen(kw_only=True)
class WakeResult:
    """What a rank has restored."""

    restored_bytes: int
