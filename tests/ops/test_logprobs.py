from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from corerl.ops import logprobs as module
from corerl.ops.logprobs import logprobs_of_logits, token_logprobs
from corerl_testing.pool import RankPool
from tests.ops import ranks
from tests.ops.ranks import Found, Head


def inputs(tokens: int, vocab: int, dtype: torch.dtype, bias: bool) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, 8), (vocab, 8), (vocab,)]
    made = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    return [made[0], made[1], made[2] if bias else None]


def targets(tokens: int, vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(1))


def by_the_book(
    hidden: Any, weight: Any, bias: Any, y: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.nn.functional.linear(hidden, weight, bias)
    log_p = (z.to(torch.promote_types(z.dtype, torch.float32)) / temperature).log_softmax(-1)
    return log_p.gather(-1, y.view(len(y), -1)).view(y.shape), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize(("chunk", "kept"), [(1, 0), (4, 0), (4, 4 * 33 * 4), (100, 0), (None, 2**20)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_equal_log_softmax_of_all_logits(
    with_entropy: bool, bias: bool, chunk: int | None, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "kept_bytes", lambda _: kept)
    given, y = inputs(10, 33, torch.float32, bias), targets(10, 33)
    leaves = [x for x in given if x is not None]
    hidden, weight, b = given
    assert hidden is not None and weight is not None
    logprobs, entropy = token_logprobs(
        hidden, weight, y, bias=b, temperature=1.7, with_entropy=with_entropy, chunk_tokens=chunk
    )
    wanted_logprobs, wanted_entropy = by_the_book(hidden, weight, b, y, 1.7)
    torch.testing.assert_close(logprobs, wanted_logprobs, rtol=0, atol=1e-6)
    w = torch.rand(2, 10, generator=torch.Generator().manual_seed(2))
    got, wanted = logprobs @ w[0], wanted_logprobs @ w[0]
    assert (entropy is not None) == with_entropy
    if entropy is not None:
        torch.testing.assert_close(entropy, wanted_entropy, rtol=1e-6, atol=1e-6)
        got, wanted = got + entropy @ w[1], wanted + wanted_entropy @ w[1]
    for mine, theirs in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


class Products(TorchDispatchMode):
    """Counts the products of hidden states and the weight that are computed in it."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.count = vocab, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and out.shape[1] == self.vocab
        return out


@pytest.mark.parametrize(("kept", "again"), [(0, 3), (4 * 33 * 4, 2), (2 * 4 * 33 * 4 + 1, 1), (2**20, 0)])
def test_kept_logits_are_not_computed_again_unless_backward_runs_twice(
    kept: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "kept_bytes", lambda _: kept)
    hidden, weight, _ = inputs(10, 33, torch.float32, False)
    assert hidden is not None and weight is not None
    with Products(33) as forward:
        loss = token_logprobs(hidden, weight, targets(10, 33), temperature=0.5, chunk_tokens=4)[0].sum()
    found = []
    for products in (again, 3):
        with Products(33) as backward:
            found.append(torch.autograd.grad(loss, (hidden, weight), retain_graph=True))
        assert (forward.count, backward.count) == (3, products)
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


def test_logits_of_another_dtype_than_those_computed_again_are_not_kept() -> None:
    """Under autocast, which the backward pass is outside of."""
    hidden, weight, _ = inputs(10, 33, torch.float32, False)
    assert hidden is not None and weight is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = token_logprobs(hidden, weight, targets(10, 33), temperature=1.0)
    found = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    exact = by_the_book(hidden, weight, None, targets(10, 33), 1.0)[0].sum()
    for mine, right in zip(found, torch.autograd.grad(exact, (hidden, weight)), strict=True):
        torch.testing.assert_close(mine, right, rtol=0.05, atol=0.05)


def test_without_a_gradient_no_logits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Tensor] = []

    def asks(hidden: torch.Tensor) -> int:
        asked.append(hidden)
        return 0

    monkeypatch.setattr(module, "kept_bytes", asks)
    hidden, weight, _ = inputs(10, 33, torch.float32, False)
    assert hidden is not None and weight is not None
    with torch.no_grad():
        token_logprobs(hidden, weight, targets(10, 33), temperature=1.0)
    token_logprobs(hidden.detach(), weight.detach(), targets(10, 33), temperature=1.0)
    assert not asked
    token_logprobs(hidden.detach(), weight, targets(10, 33), temperature=1.0)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("dtype", "temperature"), [(torch.float32, 1.7), (torch.float32, 1.0), (torch.bfloat16, 1.7), (torch.float64, 1.0)]
)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_of_logits_values_and_gradients_are_log_softmax_and_the_logits_stay(
    with_entropy: bool, dtype: torch.dtype, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(10, 33, generator=generator)).to(dtype).requires_grad_()
    before, y, weights = logits.detach().clone(), targets(10, 33), torch.rand(2, 10, generator=generator)
    log_p = (logits.to(torch.promote_types(dtype, torch.float32)) / temperature).log_softmax(-1)
    wanted = log_p.gather(-1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    logprobs, entropy = logprobs_of_logits(logits, y, temperature=temperature, with_entropy=with_entropy)
    torch.testing.assert_close(logprobs, wanted[0], rtol=0, atol=1e-5)
    loss, book = logprobs @ weights[0].to(logprobs), wanted[0] @ weights[0].to(logprobs)
    if with_entropy:
        assert entropy is not None
        torch.testing.assert_close(entropy, wanted[1], rtol=0, atol=1e-5)
        loss, book = loss + entropy @ weights[1].to(entropy), book + wanted[1] @ weights[1].to(entropy)
    else:
        assert entropy is None
    (found,), (right,) = torch.autograd.grad(loss, logits), torch.autograd.grad(book, logits)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-6 if dtype is not torch.bfloat16 else 4e-3)
    assert found.dtype is dtype and torch.equal(logits.detach(), before)


@pytest.mark.parametrize("target", [-100, 9])
def test_a_target_that_is_no_word_is_an_error(target: int) -> None:
    hidden, weight, _ = inputs(6, 9, torch.float32, False)
    assert hidden is not None and weight is not None
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        token_logprobs(hidden, weight, torch.full((6,), target), temperature=1.0)


def test_the_weights_gradient_is_summed_in_float32_over_chunks() -> None:
    # Each token adds the same small gradient: summed in bfloat16 the sum would stop growing at 256 times its size.
    tokens = 2048
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    y = torch.zeros(tokens, dtype=torch.long)
    token_logprobs(hidden, weight, y, temperature=1.0, chunk_tokens=1)[0].sum().backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [tokens / 2, -tokens / 2]


# ---- padding, and rows that ranks share ------------------------------------------------------------------------------


def wanted(head: Head) -> Found:
    """By torch alone, of the real rows alone, the rest of the gradients zero."""
    hidden, weight, bias, y, weigh = head.made()
    exact = torch.promote_types(head.dtype, torch.float32)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    if bias is not None:
        leaves.append(bias.requires_grad_())
    z = torch.nn.functional.linear(hidden, weight[: head.vocab], None if bias is None else bias[: head.vocab])
    log_p = (z.to(exact) / head.temperature).log_softmax(-1)
    logprobs = log_p.gather(-1, y.view(len(y), -1)).view(y.shape)
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = (logprobs.t() @ weigh[0].to(exact)).sum()
    if head.with_entropy:
        loss = loss + entropy @ weigh[1].to(exact)
    grads = [*torch.autograd.grad(loss, leaves), None]
    return Found(
        logprobs=logprobs.detach(),
        entropy=entropy.detach() if head.with_entropy else None,
        d_hidden=grads[0],
        d_weight=grads[1],
        d_bias=grads[2],
    )


HEADS = {
    "float64": Head(vocab=16, rows=16, dtype=torch.float64),
    "float64, padded": Head(vocab=13, rows=16, dtype=torch.float64, temperature=0.7, bias=True, chunk=4),
    "float32": Head(vocab=16, rows=16, dtype=torch.float32, temperature=1.3, chunk=1),
    "float32, padded": Head(vocab=13, rows=16, dtype=torch.float32, temperature=1.3, chunk=3),
    "padded, log-probs alone": Head(vocab=13, rows=16, dtype=torch.float32, with_entropy=False, chunk=5),
    "the last rank has padding alone": Head(vocab=8, rows=16, dtype=torch.float32, temperature=0.9, bias=True),
    "and some of the first rank's is too": Head(vocab=6, rows=16, dtype=torch.float64, chunk=2),
    "several targets": Head(vocab=13, rows=16, dtype=torch.float64, temperature=0.7, chunk=4, targets=(5,)),
    "several targets, float32": Head(vocab=13, rows=16, dtype=torch.float32, with_entropy=False, targets=(5,)),
}
TOLERANCE = {torch.float64: {"rtol": 1e-12, "atol": 1e-12}, torch.float32: {"rtol": 1e-5, "atol": 3e-6}}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_ranks_that_share_the_rows_find_what_one_process_finds(head: Head, rank_pool: RankPool) -> None:
    expected, parts = wanted(head), rank_pool.run(ranks.found, head)
    near = TOLERANCE[head.dtype]
    for part in parts:
        torch.testing.assert_close(part.logprobs, expected.logprobs, **near)
        assert torch.equal(part.logprobs, parts[0].logprobs)
        assert (part.entropy is None) == (expected.entropy is None)
        if part.entropy is not None:
            torch.testing.assert_close(part.entropy, expected.entropy, **near)
            assert torch.equal(part.entropy, parts[0].entropy)
    torch.testing.assert_close(sum(part.d_hidden for part in parts), expected.d_hidden, **near)
    d_weight = torch.cat([part.d_weight for part in parts])
    torch.testing.assert_close(d_weight, expected.d_weight, **near)
    assert not d_weight[head.vocab :].any()
    if head.bias:
        torch.testing.assert_close(torch.cat([part.d_bias for part in parts]), expected.d_bias, **near)


def test_ranks_speak_once_however_many_chunks_there_are_and_not_in_the_backward_pass(rank_pool: RankPool) -> None:
    assert rank_pool.run(ranks.collectives_of_a_pass, 10, 2) == [(2, 0)] * 2  # a maximum, and sums
    assert rank_pool.run(ranks.collectives_of_a_pass, 0, 2) == [(0, 0)] * 2


def test_more_real_rows_than_there_are_is_an_error() -> None:
    hidden, weight, _ = inputs(4, 9, torch.float32, False)
    assert hidden is not None and weight is not None
    with pytest.raises(ValueError, match="vocab_size is 10, expected 1 to 9: the weight has 1 x 9 rows"):
        token_logprobs(hidden, weight, targets(4, 9), temperature=1.0, vocab_size=10)
