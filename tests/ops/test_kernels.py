from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from corerl.weights.adapters import add_products_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# With it, Triton calls numpy instead of a GPU.
RUNS_KERNELS = importlib.util.find_spec("triton") and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
pytestmark = [pytest.mark.processes] if DEVICE == "cuda" else []  # Triton's assembler
needs_kernels = pytest.mark.skipif(not RUNS_KERNELS, reason="wants Triton and a GPU, or TRITON_INTERPRET=1")
SCALE = 7 / 3


def drawn(rows: int, columns: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three weights, B and A, each other one of a buffer."""
    torch.manual_seed(5)
    a, b = 0.1 * torch.randn(6, rank, columns), 0.1 * torch.randn(6, rows, rank)
    return torch.randn(6, rows, columns).to(dtype).to(DEVICE)[::2], b.to(DEVICE)[1::2], a.to(DEVICE)[::2]


@needs_kernels
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (64, 128), (150, 260)])
@pytest.mark.parametrize("rank", [1, 16, 100])
def test_the_kernel_adds_what_torch_does(rows: int, columns: int, rank: int) -> None:
    from corerl.ops import kernels

    weights, b, a = drawn(rows, columns, rank, torch.float32)
    around = torch.full((3, rows + 2, columns), 9.0, device=DEVICE)  # it writes nothing outside
    got = around[:, 1:-1]
    got.copy_(weights)
    kernels.add_products_(got, b, a, scale=SCALE)
    torch.testing.assert_close(got, weights + SCALE * b @ a, rtol=1e-5, atol=1e-5)
    assert (around[:, [0, -1]] == 9.0).all()


@needs_kernels
def test_bfloat16_weights_on_a_gpu_go_through_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        pytest.skip("wants a GPU")
    monkeypatch.setattr(torch, "bmm", None)
    weights, b, a = drawn(64, 64, 8, torch.bfloat16)
    got = weights.clone()
    add_products_(got, b, a, scale=SCALE)
    assert not torch.equal(got, weights)
