"""One rank of a backend on made-up samples, without Ray: the same worker as in a run, driven by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve, field, frozen

from corerl.algorithms import LossInputs, LossResult, TensorMetric
from corerl.backend import StateKey
from corerl.backend.primitives import SAVED
from corerl.checkpoint.format import BUFFER
from corerl.config import LoraConfig, ModelConfig, OptimizerConfig, RoleConfig, TrainConfig, WeightsConfig
from corerl.data import plan_forward, plan_steps
from corerl.data.packing import pack, plan_part
from corerl.errors import CorerlError
from corerl.plan.roles import Assignment
from corerl.plugin import FULL, Capability, Context, Kind, load
from corerl.plugin.origins import origins_of
from corerl.plugin.registry import Loaded
from corerl.trainer.worker import Worker
from corerl.types import (
    AdamSettings,
    Array,
    FloatArray,
    ForwardResult,
    InitResult,
    IntArray,
    LossSpec,
    Output,
    PackedBatch,
    ParallelLayout,
    Reduction,
    SampleBatch,
    Step,
    TrainResult,
    offsets_of,
)
from corerl_testing.require import require

LOSS = LossSpec(
    name="clipped",
    params={"clip_low": 0.2, "clip_high": 0.28, "entropy_coef": 0.01, "kl_coef": 0.05, "kl_estimator": "k3"},
    outputs=(Output.LOGPROBS, Output.ENTROPY),
)
VALUE_LOSS = LossSpec(name="value", params={"value_clip": 0.3}, outputs=(Output.VALUES,))
# No value is a default, so that a value that is ignored shows. eps is far above the rounding of gradients: with 1e-8, a
# gradient of 1e-9 that is pure rounding error moves its weight by a good part of the learning rate.
TRAIN = TrainConfig(
    precision="float32",
    tokens_per_micro_batch=32,
    optimizer=OptimizerConfig(lr=1e-3, betas=(0.85, 0.97), eps=1e-5, weight_decay=0.1, clip_norm=0.5),
)


def likelihood(inputs: LossInputs) -> LossResult:
    """loss = -sum_t weights_t * logprobs_t: plain maximum likelihood, without clipping or penalties."""
    assert inputs.logprobs is not None
    loss = -(inputs.columns["weights"] * inputs.logprobs).sum()
    return LossResult(loss, {"loss": TensorMetric(loss.detach(), torch.ones_like(loss), Reduction.LOSS)})


LIKELIHOOD = LossSpec(name=f"{__name__}:likelihood", outputs=(Output.LOGPROBS,))


TEMPERATURES = (0.8, 1.0, 0.7)


@frozen(kw_only=True)
class Setup:
    """What a rank needs to start a worker; plain data, equal on all ranks."""

    backend: str
    model: str  # a Hugging Face directory; if empty, weights are random for the config `fields`
    fields: Mapping[str, Any] = field(factory=dict)  # of a Hugging Face config
    vocabulary: int = 0  # as `model.vocabulary`
    pictures: str = ""  # as `model.pictures`
    tower: Literal["frozen", "trained"] = "frozen"  # as `model.tower`
    train: TrainConfig = TRAIN
    options: Mapping[str, Any] = field(factory=dict)  # the backend's own
    weights: WeightsConfig = WeightsConfig(bucket_bytes=2**14)
    seed: int = 0
    device: str = "cpu"
    sequence_multiple: int = 1  # extra padding of sequences, besides the backend's own
    value_head: bool = False  # whether it is a critic
    frozen: bool = False  # whether it is never trained
    lora: LoraConfig | None = None  # the adapters that it trains, settled
    moments: bool = True  # whether a resume loads them; else a new optimizer begins
    lifted: bool = False  # let the backend try what it declares that it lacks

    @property
    def loss(self) -> LossSpec:
        return VALUE_LOSS if self.value_head else LOSS

    @property
    def with_prefixes(self) -> Setup:
        """The same, with what samples begin with in common computed once, and trees that are cut."""
        return evolve(self, train=evolve(self.train, share_prefixes=True, tokens_per_micro_batch=50))

    def packed_by(self, tokens_per_micro_batch: int, *, sequence_multiple: int = 1) -> Setup:
        train = evolve(self.train, tokens_per_micro_batch=tokens_per_micro_batch)
        return evolve(self, train=train, sequence_multiple=sequence_multiple)


# ---- samples ---------------------------------------------------------------------------------------------------------


# Tokens of each sample, just past 32, 64 and 128: kernels divide sequences into blocks of such lengths, and what is
# wrong at their borders does not show in shorter samples. Each length comes twice, so that each of two ranks has all.
LONG = (34, 131, 66, 131, 34, 66)


def make_samples(
    seed: int, *, samples: int = 5, vocab: int = 97, temperature: float = 0.8, lengths: Sequence[int] = ()
) -> SampleBatch:
    """Samples of 4 to 23 random tokens, or of these `lengths`, in groups of two, with arbitrary but varied log-probs
    and advantages.

    Those of a group are equally long: the plain backend, which all others are compared with, makes a pass for each
    length. Advantages have both signs and a nonzero mean, so that a loss is not a small difference of large sums.
    """
    rng = np.random.default_rng(seed)
    random_sizes = np.repeat(rng.integers(4, 24, (samples + 1) // 2), 2)[:samples]
    sizes, samples = (np.array(lengths), len(lengths)) if lengths else (random_sizes, samples)
    offsets = offsets_of(sizes)
    prompt = rng.integers(1, 3, samples)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
    mask = within >= np.repeat(prompt, sizes)

    def column(values: Any) -> FloatArray:
        return np.where(mask, values, 0.0).astype(np.float32)

    total = int(offsets[-1])
    old = -np.log(vocab) + 0.3 * rng.standard_normal(total)
    return SampleBatch(
        tokens=rng.integers(3, vocab, total),
        offsets=offsets,
        columns={
            "loss_mask": mask,
            "rollout_logprobs": column(old),
            "old_logprobs": column(old),
            "ref_logprobs": column(old + 0.3 * rng.standard_normal(total)),
            "advantages": column(np.repeat(0.8 + rng.standard_normal(samples), sizes)),
            "values": column(0.5 * rng.standard_normal(total)),
            "returns": column(rng.standard_normal(total)),
            "versions": np.zeros(total, dtype=np.int64),
        },
        row_columns={"group": np.arange(samples) // 2},
        temperature=temperature,
    )


def make_branches(seed: int, *, groups: int = 3) -> SampleBatch:
    """Samples that begin alike, in groups of five, with the columns of `make_samples`: answers to one prompt, three of
    which go on with the same tokens, one with nothing after them, and two that are equal. What several have in common
    after the prompt is trained in each, with other advantages. Their order is random."""
    rng = np.random.default_rng(seed)
    rows, prompts = list[IntArray](), list[int]()
    for size in rng.integers(5, 12, groups):
        prompt, turn, one, other, short = (rng.integers(3, 97, each) for each in (size, 4, 6, 5, 2))
        answers = [one, np.concatenate([turn, other]), np.concatenate([turn, short]), turn, one]
        rows += [np.concatenate([prompt, answers[each]]) for each in rng.permutation(5)]
        prompts += [int(size)] * 5
    samples = make_samples(seed, lengths=[len(row) for row in rows])
    mask = np.concatenate([np.arange(len(row)) >= prompt for row, prompt in zip(rows, prompts, strict=True)])
    return evolve(
        samples,
        tokens=np.concatenate(rows),
        columns={**samples.columns, "loss_mask": mask},
        row_columns={"group": np.repeat(np.arange(groups), 5)},
    )


def with_targets(samples: SampleBatch, *several: int) -> SampleBatch:
    """The samples with other tokens as targets, [N] or [N, K], and of both signs what their log-probs are multiplied
    by. Of K targets the first two are often equal, and the last is the token itself."""
    rng = np.random.default_rng(len(samples.tokens))
    shape = (len(samples.tokens), *several)
    targets = rng.integers(3, 97, shape)
    if several:
        targets[::2, 1] = targets[::2, 0]
        targets[:, -1] = samples.tokens
    return samples.with_columns(targets=targets, logprob_weights=rng.uniform(-1.0, 0.3, shape).astype(np.float32))


def samples_at(step: int) -> SampleBatch:
    """The batch of optimizer step `step`: the same for every backend and world size. The temperature changes at every
    step, so that a backend that keeps the first one shows."""
    return make_samples(1000 + step, temperature=TEMPERATURES[step % len(TEMPERATURES)])


def step_at(number: int) -> Step:
    """Step `number`, with a learning rate that changes at every step, so that a backend that keeps the first shows."""
    return Step(optimizer_step=number, rollout_step=number, lr=1e-3 * 0.95**number)


# ---- the worker ------------------------------------------------------------------------------------------------------


def role_config(setup: Setup, *, resume: str = "") -> RoleConfig:
    """The role's config, with the backend's options as a plain table."""
    return RoleConfig(
        model=ModelConfig(
            path=setup.model,
            config=setup.fields,
            vocabulary=setup.vocabulary,
            pictures=setup.pictures,
            tower=setup.tower,
        ),
        train=setup.train.settled(setup.device),
        options=dict(setup.options),
        weights=setup.weights,
        device=setup.device,
        seed=setup.seed,
        timeout=60.0,
        value_head=setup.value_head,
        lora=setup.lora,
        frozen=setup.frozen,
        resume=resume,
        resume_moments=setup.moments,
    )


def make_worker(setup: Setup, *, resume: str = "") -> Worker:
    """A worker that is not initialized yet, with this process's rank and world size."""
    several = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    local_rank = rank if setup.device == "cuda" else 0
    role = "critic" if setup.value_head else "teacher" if setup.frozen else "actor"
    worker = Worker(
        Assignment(
            context=Context(role=role, rank=rank, world_size=world_size, local_rank=local_rank, run_dir=""),
            backend=setup.backend,
            config=role_config(setup, resume=resume),
            origins=origins_of(*_plugins(setup)),
        )
    )
    if setup.lifted:
        worker.backend.declared = dict.fromkeys(Capability, FULL)
    return worker


def _plugins(setup: Setup) -> Iterator[tuple[Kind, Loaded]]:
    yield Kind.BACKENDS, load(Kind.BACKENDS, setup.backend)
    if setup.pictures:
        yield Kind.PICTURES, load(Kind.PICTURES, setup.pictures)


def start(setup: Setup, *, resume: str = "") -> tuple[Worker, InitResult]:
    """An initialized worker."""
    worker = make_worker(setup, resume=resume)
    found = worker.init("127.0.0.1", 0)
    require(
        found.layout.shares_prefixes == setup.train.share_prefixes,
        f"train.share_prefixes={setup.train.share_prefixes}, but the rank's layout has shares_prefixes="
        f"{found.layout.shares_prefixes}: micro-batches do not say what samples begin with in common",
    )
    return worker, found


@contextmanager
def running(setup: Setup, *, resume: str = "") -> Iterator[Worker]:
    """`start` a worker, and shut it down at the end."""
    worker, _ = start(setup, resume=resume)
    yield worker
    worker.shutdown("the check is done")


def padded_layout(worker: Worker, setup: Setup) -> ParallelLayout:
    """The rank's layout, with the setup's extra padding of sequences."""
    layout = worker.backend.layout
    return evolve(layout, sequence_multiple=math.lcm(setup.sequence_multiple, layout.sequence_multiple))


def packed_for_training(worker: Worker, setup: Setup, samples: SampleBatch) -> PackedBatch:
    """This rank's share of one optimizer step over all samples."""
    layout = padded_layout(worker, setup)
    (plan,) = plan_steps(
        samples,
        layout,
        tokens_per_micro_batch=setup.train.tokens_per_micro_batch,
        aggregation="token-mean",
        max_tokens=32,
        seed=0,
    )
    return pack(samples, plan.shard_of(layout.dp_rank), sequence_multiple=layout.sequence_multiple)


def train(
    worker: Worker,
    setup: Setup,
    number: int,
    *,
    samples: SampleBatch | None = None,
    adam: AdamSettings | None = None,
) -> TrainResult:
    """Take optimizer step `number`, on its own samples unless others are given, and with these settings."""
    batch = packed_for_training(worker, setup, samples or samples_at(number))
    return worker.train_on(batch=batch, loss=setup.loss, step=evolve(step_at(number), adam=adam))


def parts_of_step(
    worker: Worker, setup: Setup, samples: SampleBatch, parts: int, *, unit: float
) -> tuple[list[PackedBatch], float]:
    """This rank's share of the samples' groups in several calls, with the weights of `plan_part`; and the step's
    denominator."""
    layout = padded_layout(worker, setup)
    groups = samples.row_columns["group"]
    batches, denominator = [], 0.0
    for chosen in np.array_split(np.unique(groups), parts):
        part = samples.take_rows(np.flatnonzero(np.isin(groups, chosen)))
        plan, count = plan_part(
            part,
            layout,
            tokens_per_micro_batch=setup.train.tokens_per_micro_batch,
            aggregation="token-mean",
            max_tokens=32,
            unit=unit,
        )
        batches.append(pack(part, plan.shard_of(layout.dp_rank), sequence_multiple=layout.sequence_multiple))
        denominator += count
    return batches, denominator


def forward(
    worker: Worker, setup: Setup, samples: SampleBatch, *, snapshot: str = "", outputs: tuple[Output, ...] = ()
) -> ForwardResult:
    """`outputs` of this rank's share of the samples; by default log-probs and entropy, or a critic's values."""
    layout = padded_layout(worker, setup)
    plan = plan_forward(samples, layout, tokens_per_micro_batch=setup.train.tokens_per_micro_batch)
    batch = pack(samples, plan.shard_of(layout.dp_rank), sequence_multiple=layout.sequence_multiple)
    return worker.host.forward(batch=batch, outputs=outputs or setup.loss.outputs, snapshot=snapshot)


def error_of(call: Callable[[], object]) -> str:
    """The type and message of the CorerlError that `call` raises; "" if it raises none."""
    try:
        call()
    except CorerlError as error:
        return f"{type(error).__name__}: {error.message}"
    return ""


# ---- what a rank holds -----------------------------------------------------------------------------------------------


@frozen(kw_only=True, eq=False)
class Box:
    """A copy of one chunk that this rank saves."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    values: Array


State = Mapping[str, list[Box]]  # StateKey -> this rank's boxes


def state_of(worker: Worker, keys: Sequence[StateKey] = ()) -> dict[str, list[Box]]:
    """Copies of this rank's masters, moments, parameters and buffers, or only of what `keys` name."""
    backend = worker.backend
    held = {key.value: backend.held_state(key) for key in keys or (*SAVED, StateKey.PARAM)}
    held |= {} if keys else {BUFFER: backend.buffers()}
    return {
        key: [
            Box(name=chunk.name, shape=chunk.shape, offsets=chunk.offsets, values=_copied(chunk.view))
            for chunk in chunks
            if not chunk.replica
        ]
        for key, chunks in held.items()
    }


def _copied(view: torch.Tensor) -> Array:
    # Cloned first: a storage shared with numpy can no longer be resized, so it could not sleep.
    copied: Array = view.detach().float().cpu().clone().numpy()
    return copied
