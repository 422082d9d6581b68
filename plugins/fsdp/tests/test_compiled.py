"""Compiled layers where attention is one kernel, as on a GPU: on a CPU by a reference of that kernel's operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch._dynamo.utils import counters

from corerl.ops import attention, flash
from corerl.testing import Setup, make_samples, running, tiny_fields, train
from corerl.types import SampleBatch, offsets_of
from corerl_fsdp import build, compiled

# Of torch, which asks for it while it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

FIELDS = tiny_fields("qwen3")
SIZE = int(FIELDS["hidden_size"])
# Batches of few tokens and many, of one sample and many, and one of as many tokens as a hidden state has elements.
BATCHES = [[20, 3, 19], [40] * 4, [SIZE], [SIZE - 3, 3], [2], [5, 7], [16] * 5, [9] * 40, [31], [300], [13, 2, 2, 2]]
BATCHES += [[2 + number, 50 - number] * (1 + number % 3) for number in range(19)]


def samples(lengths: Sequence[int], seed: int) -> SampleBatch:
    total, offsets = sum(lengths), offsets_of(np.array(lengths))
    long = make_samples(seed, samples=150)
    columns = {name: column[:total].copy() for name, column in long.columns.items()}
    columns["loss_mask"][offsets[:-1]] = False  # nothing predicts a first token
    for column in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns"):
        columns[column][~columns["loss_mask"]] = 0.0
    rows = {"group": np.zeros(len(lengths), dtype=np.int64)}
    return evolve(long, tokens=long.tokens[:total], offsets=offsets, columns=columns, rows=rows)


def weights(q: Tensor, k: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """[H, T, T], from all scores of each pair of tokens."""
    sequence = torch.searchsorted(cu_seqlens.long(), torch.arange(len(q)), right=True)
    seen = (sequence[:, None] == sequence).tril()
    return (torch.einsum("thd,uhd->htu", q, k) * scale).masked_fill(~seen, -torch.inf).softmax(-1)


def repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    assert (int(longest), window) == (int(cu_seqlens.diff().max()), flash.FULL)
    out = torch.einsum("htu,uhd->thd", weights(q, repeated(k, q), cu_seqlens, scale), repeated(v, q))
    return torch.empty_like(q).copy_(out), torch.zeros(q.shape[1], len(q))


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    longest: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    p = weights(q, repeated(k, q), cu_seqlens, scale)
    dp = torch.einsum("thd,uhd->htu", grad, repeated(v, q))
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    dq = torch.einsum("htu,uhd->thd", ds, repeated(k, q))
    dk, dv = (
        torch.einsum("htu,thd->uhd", of, x).unflatten(1, (k.shape[1], -1)).sum(2) for of, x in ((ds, q), (p, grad))
    )
    return torch.empty_like(q).copy_(dq), torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


def always(*_: object) -> bool:
    return True


@pytest.fixture
def one_kernel() -> Iterator[None]:
    """Attention as in half precision on a GPU. What inductor would make of a graph takes a minute here."""
    flash.flash_attention.register_kernel("cpu")(forward)
    flash.flash_attention_backward.register_kernel("cpu")(backward)
    with (
        mock.patch.object(attention, "one_kernel", always),  # a Mock cannot be traced
        mock.patch.object(build, "one_kernel", always),
        mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")),
    ):
        torch._dynamo.reset()
        counters.clear()
        yield
        torch._dynamo.reset()
        counters.clear()


def norms(batches: Sequence[Sequence[int]], *, compiled: bool) -> tuple[list[float], list[int]]:
    """Of the gradients of a step on each batch; and the graphs that were compiled until its end."""
    setup = Setup(backend="fsdp", model="", fields=FIELDS, options={"compile": compiled})
    setup = evolve(setup, train=evolve(setup.train, tokens_per_micro_batch=400))
    found, graphs = [], []
    with running(setup) as worker:
        for number, lengths in enumerate(batches):
            result = train(worker, setup, number, samples=samples(lengths, seed=number))
            found.append(result.grad_norm)
            graphs.append(counters["stats"]["unique_graphs"])
    return found, graphs


@pytest.mark.usefixtures("one_kernel")
def test_one_graph_serves_all_layers_and_all_lengths_with_the_numbers_of_layers_that_are_not_compiled() -> None:
    found, graphs = norms(BATCHES, compiled=True)
    assert graphs == [1] * 30
    assert found == pytest.approx(norms(BATCHES, compiled=False)[0], rel=1e-5)


@pytest.mark.usefixtures("one_kernel")
def test_without_a_mark_each_of_two_lengths_would_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_mark", lambda tensor: None)
    assert norms(BATCHES[:2], compiled=True)[1] == [1, 2]
