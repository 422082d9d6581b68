"""A host around the plain backend with a model of a few thousand parameters, and a batch for it: what worker extensions
wrap, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from corerl.config import ModelConfig, OptimizerConfig, RoleConfig, TrainConfig, WeightsConfig
from corerl.plugin import Context
from corerl.types import Array, LossSpec, PackedBatch, SampleBatch, Step, StepResult
from corerl_testing import PlainBackend, PlainConfig, PluginHost, StepPlan, pack

MODEL = ModelConfig(
    config={
        "model_type": "qwen3", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    tokenizer="characters:0123456789>s",
)  # fmt: skip
LOSS = LossSpec(name="clipped", params={"clip_low": 0.2, "clip_high": 0.2, "entropy_coef": 0.0, "kl_coef": 0.0})


def step(optimizer_step: int) -> Step:
    return Step(optimizer_step=optimizer_step, rollout_step=optimizer_step // 2, lr=1e-3)


def host(run_dir: Path, device: str = "cpu", **extensions: object) -> PluginHost:
    """Ready to train; extensions by name, the first outermost."""
    config = RoleConfig(
        model=MODEL,
        train=TrainConfig(optimizer=OptimizerConfig(lr=1e-3)),
        options=PlainConfig(),
        weights=WeightsConfig(),
        device=device,
        seed=0,
        timeout=60.0,
    )
    context = Context(role="actor", rank=0, world_size=1, local_rank=0, run_dir=str(run_dir))
    made = PluginHost(PlainBackend(), name="plain", extensions=list(extensions.items()), context=context)
    made.init(config, context)
    return made


def failing(hook: str) -> SimpleNamespace:
    """An extension that raises in this hook behind the backend."""

    def fails() -> Iterator[None]:
        yield
        raise ValueError("out of luck")

    return SimpleNamespace(**{hook: fails})


def train(run: PluginHost, batch: PackedBatch, step: Step) -> StepResult:
    """Both halves of a step."""
    run.forward_backward(batch, LOSS, (), True, at=step)
    return run.optimizer_step(step, 1.0)


def batch(**spoiled: Mapping[int, float]) -> PackedBatch:
    """Three samples of 4, 5 and 6 tokens in two micro-batches; `spoiled` puts numbers at tokens of a column."""
    lengths = np.array([4, 5, 6])
    tokens = np.arange(lengths.sum()) % 11
    mask = np.concatenate([np.arange(length) >= 2 for length in lengths])
    columns: dict[str, Array] = {"loss_mask": mask}
    for name, value in (("advantages", 0.5), ("old_logprobs", -2.0), ("rollout_logprobs", -2.0)):
        column = np.where(mask, np.float32(value), np.float32(0.0))
        for token, number in spoiled.get(name, {}).items():
            column[token] = number
        columns[name] = column
    samples = SampleBatch(tokens=tokens, offsets=np.concatenate([[0], np.cumsum(lengths)]), columns=columns)
    plan = StepPlan(
        micro_batches=((np.array([0, 2]), np.array([1])),),
        filler=((False, False),),
        scales=np.full(3, 1 / mask.sum(), dtype=np.float32),
    )
    return pack(samples, plan.shard_of(0), sequence_multiple=1)
