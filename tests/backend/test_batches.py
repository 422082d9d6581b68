"""Micro-batches on their way to tensors, and outputs on their way back, against hand-made columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from corerl.backend.batches import OutputCollector, to_device
from corerl.data.packing import StepPlan, pack
from corerl.types import IntArray, MicroBatch, Output, SampleBatch

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
        samples=np.array(samples),
        columns={"weights": np.array(tokens, dtype=np.float32) / 8, "experts": np.stack([tokens, tokens], axis=1)},
    )


def outputs(micro: MicroBatch, *, extra: int = 0) -> dict[Output, torch.Tensor]:
    """What a model might give: a number made from each token, `extra` tokens of device padding behind them."""
    tokens = torch.cat([torch.tensor(micro.tokens), torch.full((extra,), -1)])
    return {Output.LOGPROBS: tokens.double().requires_grad_() / -2, Output.ENTROPY: tokens.bfloat16() * 0 + 3}


def tokens_of(samples: IntArray, lengths: list[int]) -> list[float]:
    return [-(100 * s + t) / 2 for s, length in zip(samples.tolist(), lengths, strict=True) for t in range(length)]


def test_a_micro_batch_becomes_tensors_of_the_same_values_and_kinds() -> None:
    micro = micro_batch([2, 0], [3, 2], multiple=4)
    batch = to_device(micro, CPU)
    assert batch.tokens.tolist() == [200, 201, 202, 0, 0, 1, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert batch.packing.cu_seqlens.tolist() == [0, 4, 8]
    assert (batch.tokens.dtype, batch.positions.dtype) == (torch.int64, torch.int64)
    assert batch.columns["weights"].tolist() == [25.0, 25.125, 25.25, 0.0, 0.0, 0.125, 0.0, 0.0]
    assert batch.columns["weights"].dtype == torch.float32
    assert batch.columns["experts"].shape == (8, 2)


def test_tensors_are_copies_of_arrays_that_nobody_may_write_to() -> None:
    micro = micro_batch([0], [3], multiple=1)
    for array in (micro.tokens, micro.positions, *micro.columns.values()):
        array.setflags(write=False)
    batch = to_device(micro, CPU)
    for tensor in (batch.tokens, batch.positions, *batch.columns.values()):
        tensor.fill_(7)
    assert micro.tokens.tolist() == [0, 1, 2]
    assert micro.positions.tolist() == [0, 1, 2]
    assert micro.columns["weights"].tolist() == [0.0, 0.125, 0.25]


def test_the_loss_is_given_the_outputs_that_there_are_and_all_columns() -> None:
    micro = micro_batch([0], [3], multiple=1)
    batch = to_device(micro, CPU)
    logprobs = torch.arange(3.0)
    inputs = batch.loss_inputs({Output.LOGPROBS: logprobs})
    assert inputs.logprobs is logprobs
    assert inputs.entropy is None and inputs.values is None
    assert inputs.columns is batch.columns
    values_alone = batch.loss_inputs({Output.VALUES: logprobs})
    assert values_alone.logprobs is None and values_alone.values is logprobs
    every = {output: torch.arange(3.0) for output in Output}
    inputs = batch.loss_inputs(every)
    assert inputs.entropy is every[Output.ENTROPY] and inputs.values is every[Output.VALUES]


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
    assert result.samples.tolist() == [2, 0, 5]
    assert result.offsets.tolist() == [0, 3, 5, 9]
    assert result.outputs[Output.LOGPROBS].tolist() == tokens_of(result.samples, [3, 2, 4])
    assert result.outputs[Output.ENTROPY].tolist() == [3.0] * 9
    assert all(result.outputs[output].dtype == np.float32 for output in WANTED)


def test_what_is_written_to_an_output_afterwards_does_not_come_back() -> None:
    collector, micro = OutputCollector(), micro_batch([2], [4], multiple=1)
    values = torch.arange(4.0)
    collector.add(micro, {Output.LOGPROBS: values})
    values.fill_(-1)
    assert collector.finish((Output.LOGPROBS,)).outputs[Output.LOGPROBS].tolist() == [0.0, 1.0, 2.0, 3.0]


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


def test_experts_come_back_as_integers_of_every_layer() -> None:
    collector = OutputCollector()
    for micro in (micro_batch([2, 0], [3, 2], multiple=4), micro_batch([-1, 1], [3, 1], multiple=2)):
        tokens = torch.tensor(micro.tokens, dtype=torch.int16)
        experts = torch.stack([tokens, tokens + 1, -tokens, tokens * 0, tokens, tokens], dim=1).reshape(-1, 3, 2)
        collector.add(micro, {Output.LOGPROBS: tokens.float(), Output.ROUTED_EXPERTS: experts})
    experts = collector.finish((Output.LOGPROBS, Output.ROUTED_EXPERTS)).outputs[Output.ROUTED_EXPERTS]
    assert experts.dtype == np.int16
    assert experts.tolist() == [[[t, t + 1], [-t, 0], [t, t]] for t in (200, 201, 202, 0, 1, 100)]


def test_a_rank_of_fillers_gives_empty_outputs() -> None:
    collector = OutputCollector()
    filler = micro_batch([-1, -1], [2, 3], multiple=1)
    collector.add(filler, outputs(filler))
    result = collector.finish(WANTED)
    assert result.samples.tolist() == []
    assert result.samples.dtype == np.int64
    assert result.offsets.tolist() == [0]
    assert {output: array.shape for output, array in result.outputs.items()} == dict.fromkeys(WANTED, (0,))
    assert all(array.dtype == np.float32 for array in result.outputs.values())


def test_every_sample_that_is_packed_comes_back_once_with_its_own_tokens() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, 12)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    batch = SampleBatch(
        tokens=rng.integers(0, 1000, total), offsets=offsets, columns={"loss_mask": np.ones(total, dtype=np.bool_)}
    )
    order = rng.permutation(12)
    plan = StepPlan(
        micro_batches=((order[:5], order[5:6], order[6:], order[:1]),),
        filler=((False, False, False, True),),
        scales=np.zeros(12, dtype=np.float32),
    )
    collector = OutputCollector()
    for micro in pack(batch, plan.share(0), sequence_multiple=4).micro_batches:
        collector.add(micro, {Output.LOGPROBS: to_device(micro, CPU).tokens})
    result = collector.finish((Output.LOGPROBS,))
    assert result.samples.tolist() == order.tolist()
    came = np.split(result.outputs[Output.LOGPROBS], result.offsets[1:-1])
    for sample, tokens in zip(order, came, strict=True):
        assert tokens.tolist() == batch.tokens[offsets[sample] : offsets[sample + 1]].tolist()
