from __future__ import annotations

import importlib.util
import os
from types import ModuleType
from typing import Any

import pytest
import torch

from corerl.ops import softmax
from corerl.ops.softmax import RowSums, Slopes, gradient_, row_sums

TOKENS, WORDS = 7, 4999  # more words than a kernel takes at a time
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# With it, Triton calls numpy instead of a GPU.
RUNS_KERNELS = importlib.util.find_spec("triton") and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


@pytest.fixture(
    params=[
        "torch",
        pytest.param(
            "kernels",
            marks=[
                pytest.mark.skipif(not RUNS_KERNELS, reason="wants Triton and a GPU, or TRITON_INTERPRET=1"),
                pytest.mark.processes,  # Triton's assembler
            ],
        ),
    ]
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernels: ModuleType | None = None
    if request.param == "kernels":
        from corerl.ops import kernels
    monkeypatch.setattr(softmax, "kernels_for", lambda logits: kernels)
    return str(request.param)


def drawn(dtype: torch.dtype, words: int = WORDS, several: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [T, V], targets [T, K], of which the last two are equal, and [2, T] to weigh log-probs and entropies
    with."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(TOKENS, words, generator=generator, device=DEVICE) * 5
    logits[0, 3] = 60.0  # one that is certain
    targets = torch.randint(0, 8, (TOKENS, several), generator=generator, device=DEVICE)
    targets[0], targets[1] = 3, words // 2
    targets[:, -2:] = targets[:, -1:]
    return logits.to(dtype), targets, torch.rand(2, TOKENS, generator=generator, device=DEVICE)


@pytest.mark.parametrize("padding", [0, 900])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("several", [1, 3])
def test_sums_and_gradients_are_those_of_float64(
    several: int, dtype: torch.dtype, temperature: float, padding: int, way: str
) -> None:
    logits, y, weigh = drawn(dtype, several=several)
    share = torch.tensor([1.0, -0.4, 0.7], device=DEVICE)[:several]
    real = WORDS - padding
    z = logits.double().requires_grad_()
    x = z[:, :real] / temperature
    log_p = x.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    wanted = log_p.gather(-1, y) @ share.double()

    sums = row_sums(logits, y, temperature=temperature, real=real, with_spread=True)
    assert {each.dtype for each in sums} == {torch.float32}
    below = x - x.amax(-1, keepdim=True)
    expected = RowSums(
        chosen=x.gather(-1, y),
        peak=x.amax(-1),
        total=below.exp().sum(-1),
        spread=(below.exp() * below).sum(-1),
    )
    for got, want in zip(sums, expected, strict=True):
        torch.testing.assert_close(got.double(), want.detach(), rtol=1e-5, atol=1e-6)
    alone = row_sums(logits, y, temperature=temperature, real=real, with_spread=False)
    assert not alone.spread.any()
    for got, want in zip(alone[:3], sums[:3], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)

    for with_entropy in (False, True):
        loss = wanted @ weigh[0].double() + (entropy @ weigh[1].double() if with_entropy else 0)
        (d_z,) = torch.autograd.grad(loss, z, retain_graph=True)
        slope = -weigh[1] / temperature if with_entropy else None
        falls = -weigh[0] * share.sum() / temperature + (slope * entropy.detach().float() if slope is not None else 0)
        normalizer = x.logsumexp(-1).detach().float()
        slopes = Slopes(falls=falls, rises=weigh[0][:, None] * share / temperature, slope=slope)
        got = gradient_(logits.clone(), y, normalizer, slopes, temperature=temperature, real=real)
        assert got.dtype == dtype
        assert not got[:, real:].any()
        unit = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
        if way == "kernels" and DEVICE == "cpu" and dtype == torch.bfloat16:
            unit = 2**-7  # Triton's interpreter cuts off what a GPU rounds
        # Beside rounding, normalizers of 80 are exact to 8e-6, and float16 knows nothing below 6e-8.
        torch.testing.assert_close(got.double(), d_z, rtol=unit + 1e-4, atol=1e-6)


@pytest.mark.parametrize("target", [-100, 30, 40])
def test_a_kernel_makes_a_target_that_is_no_word_no_number(target: int, way: str) -> None:
    logits, y, _ = drawn(torch.float32, words=40)
    y[2] = target
    if way == "torch":
        pytest.skip("an IndexError, which a GPU tells of later")
    sums = row_sums(logits, y, temperature=1.0, real=30, with_spread=False)
    assert sums.chosen.isnan().tolist() == [[row == 2] for row in range(TOKENS)]


@pytest.mark.parametrize("ruled_out", [float("-inf"), torch.finfo(torch.bfloat16).min])
def test_ruled_out_tokens_change_neither_entropy_nor_gradient(ruled_out: float, way: str) -> None:
    logits, y, weigh = drawn(torch.bfloat16, words=40)
    kept = [column for column in range(40) if column != 30]
    y.clamp_(max=20)
    logits[:, 30] = ruled_out  # bfloat16's least number / 0.7 is -inf in float32
    how: Any = {"temperature": 0.7, "with_spread": True}
    sums, without = row_sums(logits, y, real=40, **how), row_sums(logits[:, kept].contiguous(), y, real=39, **how)
    for got, want in zip(sums, without, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    slopes = Slopes(falls=weigh[0], rises=-weigh[0][:, None], slope=weigh[1])
    normalizer = sums.peak + sums.total.log()
    got = gradient_(logits.clone(), y, normalizer, slopes, temperature=0.7, real=40)
    assert not got[:, 30].any()
    rest = gradient_(logits[:, kept].contiguous(), y, normalizer, slopes, temperature=0.7, real=39)
    torch.testing.assert_close(got[:, kept], rest, rtol=0, atol=0)
