from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from corerl.ops import attention
from corerl.ops.attention import packed_attention
from corerl.ops.packing import PackedSequences
from tests.ops.flash import as_the_kernel, back_from_the_kernel, scored

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
LAYOUTS = {
    "equal": [8, 8, 8],
    "similar": [20, 3, 19, 1, 18, 4, 3, 0, 20],
    "one": [13],
    "hundreds": list(np.random.default_rng(0).integers(1, 12, 300)),
}


def by_the_book(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax over all T x T scores, all but those of earlier tokens of the same sequence struck out, and a sink's."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(q.device)
    visible = (sequence[:, None] == sequence[None]).tril()
    if window is not None:
        visible = visible & ~visible.new_ones(visible.shape).tril(-window)
    scores = torch.einsum("thd,uhd->htu", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    further = [] if sinks is None else [sinks[:, None, None].expand(-1, len(q), 1)]
    weights = torch.cat([scores.masked_fill(~visible, -torch.inf), *further], dim=-1).softmax(-1)
    return torch.einsum("htu,uhd->thd", weights[..., : len(q)], v)


def qkv(tokens: int, kv_heads: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, heads, 16, generator=generator).to(device, dtype).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]


def assert_near(got: torch.Tensor, inputs: list[torch.Tensor], wanted: torch.Tensor, exact: list[torch.Tensor]) -> None:
    """Compare outputs, and gradients in `inputs` with those in `exact`, in float32 or on a GPU in bfloat16."""
    close = 0.01 if got.dtype is torch.bfloat16 else 1e-5
    assert float((got.float() - wanted).detach().norm() / wanted.detach().norm()) < close
    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(got.device)
    right = torch.autograd.grad(wanted, exact, direction)
    most = max(float(each.norm()) for each in right)
    for mine, theirs in zip(torch.autograd.grad(got, inputs, direction.to(got.dtype)), right, strict=True):
        # With a window of 1 and no sink all gradients of queries and keys are 0.
        assert float((mine.float() - theirs).norm()) < 2 * close * max(float(theirs.norm()), 1e-2 * most)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_attention_and_its_gradients_are_those_of_a_block_mask(layout: str, kv_heads: int, device: str) -> None:
    lengths = [int(n) for n in LAYOUTS[layout]]
    inputs = qkv(sum(lengths), kv_heads, device, torch.float32)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    got = packed_attention(*inputs, PackedSequences.of(bounds, device), 0.3)
    wanted = by_the_book(*inputs, lengths, 0.3)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert_near(got, inputs, wanted, inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 1, 7, 50])
@pytest.mark.parametrize("further", ["nothing", "softcap", "sinks"])
def test_windows_softcaps_and_sinks_are_those_of_a_block_mask(
    further: str, window: int | None, kv_heads: int, device: str
) -> None:
    """On a GPU in bfloat16, where full attention and windows are one kernel."""
    lengths, dtype = [20, 3, 19, 1, 30], torch.bfloat16 if device == "cuda" else torch.float32
    inputs = qkv(sum(lengths), kv_heads, device, dtype)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    mine: dict[str, Any] = {"window": window}
    theirs = dict(mine)
    if further == "softcap":
        mine["softcap"] = theirs["softcap"] = 0.7
    if further == "sinks":
        inputs.append(torch.tensor([-2.0, 0.0, 1.0, 3.0], device=device, dtype=dtype, requires_grad=True))
        exact.append(inputs[-1].detach().float().requires_grad_())
        mine["sinks"], theirs["sinks"] = inputs[-1], exact[-1]
    packing = PackedSequences.of(np.concatenate([[0], np.cumsum(lengths)]), device)
    got = packed_attention(*inputs[:3], packing, 0.3, **mine)
    wanted = by_the_book(*exact[:3], lengths, 0.3, **theirs)
    assert_near(got, inputs, wanted, exact)


SEQUENCES, SHARED = [20, 23, 9, 9, 7, 30], [0, 12, 9, 9, 0, 5]  # two levels, a beginning, and that once more


def on_paths(packing: PackedSequences, window: int | None) -> torch.Tensor:
    """[N, N] whether a token sees another, which is on its path and at most so far back."""
    assert packing.prefixes is not None
    seen = torch.zeros(packing.tokens, packing.tokens, dtype=torch.bool)
    for path in packing.prefixes.place.cpu().split(SEQUENCES):
        for depth in range(len(path)):
            seen[path[depth], path[max(0, depth + 1 - (window or len(path))) : depth + 1]] = True
    return seen


@pytest.mark.parametrize("device", [*DEVICES, "the kernel's reference"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_a_token_of_a_tree_sees_its_own_path(
    window: int | None, kv_heads: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU in bfloat16, where it is one kernel on copies of keys and values."""
    if device not in ("cpu", "cuda"):
        device = "cpu"
        monkeypatch.setattr(attention, "one_kernel", lambda device, dtype: True)
        monkeypatch.setattr(attention, "KERNEL", as_the_kernel)
        monkeypatch.setattr(attention, "KERNEL_BACKWARD", back_from_the_kernel)
    bounds = np.concatenate([[0], np.cumsum(SEQUENCES)])
    packing = PackedSequences.of(bounds, device).with_prefixes(np.array(SHARED))
    inputs = qkv(packing.tokens, kv_heads, device, torch.bfloat16 if device == "cuda" else torch.float32)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    got = packed_attention(*inputs, packing, 0.3, window=window)
    wanted = scored(*exact, on_paths(packing, window), 0.3)
    assert_near(got, inputs, wanted, exact)


def test_a_softcap_with_sinks_is_refused() -> None:
    q = torch.zeros(4, 1, 8)
    with pytest.raises(ValueError, match="softcap and sinks are both given"):
        packed_attention(q, q, q, PackedSequences.of(np.array([0, 4]), "cpu"), softcap=1.0, sinks=torch.zeros(1))


@pytest.mark.parametrize("bounds", [[1, 3], [0, 4, 2], []])
def test_bounds_that_are_none_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must begin with 0 and never decrease"):
        PackedSequences.of(torch.tensor(bounds, dtype=torch.int64), "cpu")


def test_tokens_that_the_packing_does_not_know_are_refused() -> None:
    q = torch.zeros(5, 1, 4)
    with pytest.raises(ValueError, match="have 5, 5, 5 tokens, but their packing has 4"):
        packed_attention(q, q, q, PackedSequences.of(torch.tensor([0, 4]), "cpu"))


def test_no_token_at_all_is_fine() -> None:
    q = torch.zeros(0, 2, 4)
    assert packed_attention(q, q, q, PackedSequences.of(torch.tensor([0]), "cpu")).shape == (0, 2, 4)
