"""Micro-batches on their way to tensors, and outputs on their way back, against hand-made columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from corerl.backend.batches import OutputCollector
from corerl.types import IntArray, MicroBatch, Output

CPU = torch.device("cpu")
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
WANTED = (Output.LOGPROBS, Output.ENTROPY)


def micro_batch(samples: list[int], lengths: list[int], *, multiple: int) -> MicroBatch:
    """Sequences of tokens 100 * sample + position, each padded to a multiple with token 0."""
    padded = [-(-length // multiple) * multiple for length in lengths]
    tokens = [
        100 * abs(sample) + position if position < length else 0
        for sample, length, size in zip(samples, lengths, padded, strict=True)
        for position in range(size)
    ]
    return MicroBatch(
        tokens=np.array(tokens),
        positions=np.concatenate([np.arange(size) for size in padded]),
        cu_seqlens=np.concatenate([[0], np.cumsum(padded)]),
        lengths=np.array(lengths),
        rows=np.array(samples),
        columns={"weights": np.array(tokens, dtype=np.float32) / 8, "experts": np.stack([tokens, tokens], axis=1)},
    )


def outputs(micro: MicroBatch, *, extra: int = 0) -> dict[Output, torch.Tensor]:
    """What a model might give: a number made from each token, `extra` tokens of device padding behind them."""
    tokens = torch.cat([torch.tensor(micro.tokens), torch.full((extra,), -1)])
    return {Output.LOGPROBS: tokens.double().requires_grad_() / -2, Output.ENTROPY: tokens.bfloat16() * 0 + 3}


def tokens_of(samples: IntArray, lengths: list[int]) -> list[float]:
    return [-(100 * s + t) / 2 for s, length in zip(samples.tolist(), lengths, strict=True) for t in range(length)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("extra", [0, 5])
def test_outputs_come_back_without_padding_and_fillers_in_the_order_given(extra: int, device: str) -> None:
    collector = OutputCollector()
    parts = (
        micro_batch([2, 0], [3, 2], multiple=4),
        micro_batch([-1], [2], multiple=4),  # a filler
        micro_batch([5, -1], [4, 3], multiple=4),  # one beside a real sample
    )
    for micro in parts:
        collector.add(micro, {output: values.to(device) for output, values in outputs(micro, extra=extra).items()})
    result = collector.finish(WANTED)
    assert result.rows.tolist() == [2, 0, 5]
    assert result.offsets.tolist() == [0, 3, 5, 9]
    assert result.outputs[Output.LOGPROBS].tolist() == tokens_of(result.rows, [3, 2, 4])
    assert result.outputs[Output.ENTROPY].tolist() == [3.0] * 9
    assert all(result.outputs[output].dtype == np.float32 for output in WANTED)


@ON_GPU
def test_outputs_are_waited_for_in_the_end_and_not_before() -> None:
    micro = micro_batch([2], [1000], multiple=1)
    for cycles in (0, 2_000_000_000):  # at first pinned memory is taken, and kernels are loaded
        collector, values = OutputCollector(), torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        done = torch.cuda.Event()
        done.record()
        values += 3
        collector.add(micro, {Output.LOGPROBS: values})
        waited = done.query()
        assert collector.finish((Output.LOGPROBS,)).outputs[Output.LOGPROBS].tolist() == [3.0] * 1000
    assert not waited
