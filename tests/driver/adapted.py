"""A checkpoint of a role that trains adapters, or all weights, as a backend's ranks write it after two steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen

from corerl.checkpoint.commit import begin, commit
from corerl.config.schema import Config
from corerl.types import FloatArray, ForwardResult, MemoryKind, Output, SampleBatch
from corerl_testing.harness import Setup, forward, make_samples, packed_for_training, running, step_at
from corerl_testing.inprocess import InProcessSender
from corerl_testing.pool import OneRank
from corerl_testing.scenarios.sleeping import resident
from tests.driver.saved import recorded

STEPS, LR = 2, 0.03  # so large that two steps change every log-prob


@frozen(kw_only=True, eq=False)
class Adapted:
    checkpoint: Path
    samples: SampleBatch
    before: FloatArray  # what the model gives for the samples' tokens: log-probs, or a critic's values
    after: FloatArray  # the same after the steps
    held: Mapping[MemoryKind, int]  # bytes after the steps
    sent: Collection[str]  # the tensors of an update of weights


def column_of(result: ForwardResult, samples: SampleBatch, output: Output = Output.LOGPROBS) -> FloatArray:
    """What a worker has computed, in the order of the samples' tokens."""
    found: FloatArray = np.zeros(samples.offsets[-1], np.float32)
    for row, start, stop in zip(result.rows, result.offsets, result.offsets[1:], strict=False):
        found[samples.offsets[row] : samples.offsets[row + 1]] = result.outputs[output][start:stop]
    return found


def tokens_of(samples: SampleBatch) -> list[torch.Tensor]:
    return [torch.tensor(each) for each in np.split(samples.tokens, samples.offsets[1:-1])]


def logprobs_by(logits: Callable[[torch.Tensor], torch.Tensor], samples: SampleBatch) -> FloatArray:
    """What a model of transformers gives for the samples' tokens, 0 for the first of each; `logits` [T, V] of one."""
    found = []
    with torch.no_grad():
        for tokens in tokens_of(samples):
            log_p = (logits(tokens)[:-1] / samples.temperature).log_softmax(-1)
            found += [np.zeros(1), log_p.gather(-1, tokens[1:, None])[:, 0].numpy()]
    return np.concatenate(found)


def train_adapted(run_dir: Path, config: Config, *, role: str = "actor", backend: str = "plain") -> Adapted:
    """`config` says the model, the adapters of the role, and the run's seed; one rank, which is this process."""
    lora = config.lora_of(role)
    assert lora is None or lora.rank is not None  # it is settled
    model = config.model_of(role)
    setup = Setup(
        backend=backend,
        model=model.path,
        fields=model.config,
        seed=config.run.seed,
        value_head=role == "critic",
        lora=lora,
        train=evolve(Setup(backend="", model="").train, precision=config.train_of(role).settled("cpu").precision),
    ).packed_by(10**6)
    samples = make_samples(3, vocab=16)
    partial = begin(run_dir, STEPS)
    (seen,) = OneRank().run(train_rank, setup, samples, str(partial / role))
    return Adapted(checkpoint=commit(partial, recorded(config, STEPS), ranks={role: 1}), samples=samples, **seen)


def train_rank(setup: Setup, samples: SampleBatch, directory: str) -> dict[str, Any]:
    """Take the steps, update the weights of an engine, and save; what `Adapted` has of it."""
    output = Output.VALUES if setup.value_head else Output.LOGPROBS
    sent: list[str] = []

    def passed() -> FloatArray:
        return column_of(forward(worker, setup, samples, outputs=(output,)), samples, output)

    with running(setup) as worker:
        before = passed()
        for number in range(STEPS):
            batch = packed_for_training(worker, setup, samples)
            result = worker.train_on(batch=batch, loss=setup.loss, step=evolve(step_at(number), lr=LR))
            assert math.isfinite(result.grad_norm) and result.grad_norm > 0
        held = {kind: resident(worker, kind) for kind in MemoryKind}
        after = passed()
        worker.host.update_weights(InProcessSender(sent.extend), 1)
        assert worker.save(directory, step_at(STEPS), False).complete
    return {"before": before, "after": after, "held": held, "sent": set(sent)}
