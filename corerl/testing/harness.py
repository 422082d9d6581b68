"""A backend on made-up samples, without Ray: the same worker that a run starts, driven in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve

from corerl.config.schema import ModelConfig, OptimizerConfig, RoleConfig, TrainConfig, WeightsConfig
from corerl.data.plan import StepPlan, plan_forward, plan_steps
from corerl.plugin.context import Context
from corerl.plugin.fingerprint import fingerprint
from corerl.plugin.registry import Kind, load
from corerl.trainer.worker import Assignment, Worker
from corerl.types import FloatArray, LossSpec, Output, SampleBatch, Step

LOSS = LossSpec(
    name="clipped",
    params={"clip_low": 0.2, "clip_high": 0.28, "entropy_coef": 0.01, "kl_coef": 0.0, "kl_estimator": "k3"},
    outputs=(Output.LOGPROBS, Output.ENTROPY),
)
TRAIN = TrainConfig(
    tokens_per_micro_batch=64,
    optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_norm=0.5),
)


def make_samples(seed: int, *, samples: int = 8, vocab: int = 97, temperature: float = 1.0) -> SampleBatch:
    """Samples of 4 to 23 random tokens, in groups of two, with log-probs and advantages that mean nothing but differ."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 24, samples)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    prompt = rng.integers(1, 3, samples)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    mask = within >= np.repeat(prompt, lengths)

    def column(values: Any) -> FloatArray:
        return np.where(mask, values, 0.0).astype(np.float32)

    total = int(offsets[-1])
    old = column(-np.log(vocab) + 0.3 * rng.standard_normal(total))
    return SampleBatch(
        tokens=rng.integers(3, vocab, total),
        offsets=offsets,
        columns={
            "loss_mask": mask,
            "rollout_logprobs": old,
            "old_logprobs": old,
            "advantages": column(np.repeat(rng.standard_normal(samples), lengths)),
            "versions": np.zeros(total, dtype=np.int64),
        },
        rows={"group": np.arange(samples) // 2},
        temperature=temperature,
    )


def make_worker(
    backend: str,
    model: ModelConfig | str | Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    train: TrainConfig = TRAIN,
    options: Mapping[str, Any] | None = None,
    resume: str = "",
    bucket_bytes: int = 2**14,
    run_dir: str = "",
) -> Worker:
    """A worker that has joined and is initialised. With several ranks the process must be in their group already."""
    loaded = load(Kind.BACKENDS, backend)
    config = RoleConfig(
        model=model if isinstance(model, ModelConfig) else ModelConfig(path=str(model)),
        train=train,
        options=dict(options or {}),
        weights=WeightsConfig(bucket_bytes=bucket_bytes),
        device="cpu",
        seed=0,
        timeout=60.0,
        resume=resume,
    )
    worker = Worker(
        Assignment(
            context=Context(role="actor", rank=rank, world_size=world_size, local_rank=0, run_dir=run_dir),
            backend=backend,
            config=config,
            loss=LOSS,
            fingerprint=fingerprint(loaded, [], LOSS),
        )
    )
    worker.init("127.0.0.1", 0)
    return worker


def plans(worker: Worker, samples: SampleBatch, *, mini_batches: int = 1, seed: int = 0) -> list[StepPlan]:
    layout = worker.backend.layout
    return plan_steps(
        samples,
        mini_batches=mini_batches,
        epochs=1,
        dp_size=layout.dp_size,
        tokens_per_micro_batch=worker.config.train.tokens_per_micro_batch,
        sequence_multiple=layout.sequence_multiple,
        micro_batch_multiple=layout.micro_batch_multiple,
        aggregation="token-mean",
        max_tokens=32,
        seed=seed,
    )


def step_at(number: int, lr: float = 1e-3) -> Step:
    return Step(optimizer_step=number, rollout_step=number, lr=lr)


def train_steps(
    worker: Worker, numbers: Sequence[int], *, loss: LossSpec = LOSS, samples: int = 8
) -> list[dict[str, float]]:
    """One optimizer step for each number, each on samples made from it; this rank's part of the loss, and the norm."""
    trace = []
    for number in numbers:
        batch = make_samples(1000 + number, samples=samples)
        result = worker.train(batch, plans(worker, batch)[0], loss, step_at(number))
        trace.append(
            {"loss": result.metrics["loss"].value, "grad_norm": result.grad_norm, "applied": float(result.applied)}
        )
    return trace


def total_trace(ranks: Sequence[Sequence[Mapping[str, float]]]) -> list[dict[str, float]]:
    """The ranks' traces as the driver sees them: losses summed over dp, norms equal."""
    together = []
    for parts in zip(*ranks, strict=True):
        assert len({part["grad_norm"] for part in parts}) == 1, f"ranks disagree on the norm: {parts}"
        together.append({**parts[0], "loss": sum(part["loss"] for part in parts)})
    return together


def logprobs(worker: Worker, samples: SampleBatch, *, weights: str = "") -> Any:
    """This rank's ForwardResult over all samples of the batch that are its own."""
    layout = worker.backend.layout
    plan = plan_forward(
        samples,
        dp_size=layout.dp_size,
        tokens_per_micro_batch=worker.config.train.tokens_per_micro_batch,
        sequence_multiple=layout.sequence_multiple,
        micro_batch_multiple=layout.micro_batch_multiple,
    )
    return worker.forward(samples, plan, (Output.LOGPROBS, Output.ENTROPY), weights)


def with_optimizer(train: TrainConfig, **changes: Any) -> TrainConfig:
    return evolve(train, optimizer=evolve(train.optimizer, **changes))
