from __future__ import annotations

import sys
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch

from corerl.ops import cudnn
from corerl.ops.attention import packed_attention
from corerl.ops.packing import PackedSequences
from tests.ops.test_attention import by_the_book

HERE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
needs_it = pytest.mark.skipif(not cudnn._present(HERE), reason="wants a Hopper GPU and nvidia-cudnn-frontend")


def sizes(lengths: list[int], *, heads: int = 4, kv_heads: int = 2, window: int = 0) -> cudnn.Sizes:
    """Where every GPU has cuDNN, and every size is worth it."""
    q, k = torch.empty(sum(lengths), heads, 16), torch.empty(sum(lengths), kv_heads, 16)
    with mock.patch.multiple(cudnn, LEAST_WORK=0, _present=lambda device: True, _supported=lambda sizes: True):
        found = cudnn.sizes_of(q, k, bounds_of(lengths), max(lengths), 0.25, window)
    assert found is not None
    return found


def bounds_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def test_batches_of_similar_sizes_share_a_plan() -> None:
    first = sizes([1500, 1900, 600])
    assert first == sizes([2000, 10, 1400, 30]) and hash(first) == hash(sizes([2000, 10, 1400, 30]))
    assert (first.sequences, first.longest, first.tokens) == (4, 2048, 4096)
    assert first != sizes([2049, 1051]) and first != sizes([1500, 1900, 600], kv_heads=1)


def test_a_window_as_long_as_the_longest_sequence_is_none() -> None:
    assert sizes([1500, 700], window=1500).window == 0
    assert sizes([1500, 700], window=1499).window == 1499


def test_places_are_of_elements_and_sequences_that_fill_up_are_empty() -> None:
    lengths = [5, 1, 7, 2, 3]
    given = sizes(lengths)
    places = cudnn._places(bounds_of(lengths), given)
    bounds = np.array([0, 5, 6, 13, 15, 18, 18, 18, 18])
    assert places[cudnn._Use.LENGTHS].tolist() == [5, 1, 7, 2, 3, 0, 0, 0]
    elements = {cudnn._Use.AT_Q: 4 * 16, cudnn._Use.AT_KV: 2 * 16, cudnn._Use.AT_LSE: 4}
    for use, of_a_token in elements.items():
        assert places[use].tolist() == (bounds * of_a_token).tolist()
        assert places[use].dtype == torch.int64 and places[use].is_contiguous()
    full = [5, 1, 7, 2]
    assert cudnn._places(bounds_of(full), sizes(full))[cudnn._Use.LENGTHS].tolist() == full


def test_layers_share_the_places_of_their_packing_alone() -> None:
    first, second = bounds_of([5, 1]), bounds_of([5, 1])
    plain, windowed = sizes([5, 1]), sizes([5, 1], window=3)
    of_layers = [cudnn._places(first, each) for each in (plain, windowed, plain)]
    assert of_layers[0] is of_layers[2] is not of_layers[1]
    assert cudnn._places(second, plain) is not of_layers[0]
    del first, second
    for lengths in ([2, 4], [1, 5], [3, 3]):  # whose tensors may lie where earlier ones did
        assert cudnn._places(bounds_of(lengths), plain)[cudnn._Use.LENGTHS].tolist() == lengths


def test_torch_attends_where_cudnn_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    present: dict[str, bool] = {"GPU": True, "plans": True}
    monkeypatch.setattr(cudnn, "_present", lambda device: present["GPU"])
    monkeypatch.setattr(cudnn, "_supported", lambda sizes: present["plans"])

    def takes(tokens: int, longest: int, heads: int, size: int) -> bool:
        q = torch.empty(tokens, heads, size, device="meta")
        return cudnn.sizes_of(q, q, bounds_of([longest, tokens - longest]), longest, 0.1, 0) is not None

    assert takes(16384, 1024, 16, 128)
    assert not takes(16384, 512, 16, 128)
    assert not takes(16000, 2000, 9, 64)
    assert not takes(16384, 1024, 16, 136)
    for name in present:
        present[name] = False
        assert not takes(16384, 1024, 16, 128)
        present[name] = True


def test_sizes_without_a_plan_are_torchs_and_a_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(sizes: cudnn.Sizes, *, backward: bool, deterministic: bool = False) -> None:
        if backward:
            raise RuntimeError("No valid engine configs")

    monkeypatch.setattr(cudnn, "_plan", plan)
    with pytest.warns(UserWarning, match="attention is torch's, since cuDNN has no plan for it: No valid engine"):
        assert not cudnn._supported.__wrapped__(sizes([1500, 700]))


@pytest.mark.parametrize("by_heads", [False, True])
def test_results_have_the_memory_layout_of_what_they_belong_to(by_heads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled layers were told that they would; transformers hands queries and keys over by heads."""
    monkeypatch.setattr(cudnn, "_plan", lambda sizes, **_: None)
    given: list[dict[cudnn._Use, torch.Tensor]] = []

    def execute(plan: None, tensors: dict[cudnn._Use, torch.Tensor], device: torch.device) -> None:
        assert all(each.is_contiguous() for each in tensors.values())
        given.append(tensors)
        for use in (cudnn._Use.OUT, cudnn._Use.DQ, cudnn._Use.DK, cudnn._Use.DV):
            if use in tensors and (len(given) == 1 or use is not cudnn._Use.OUT):
                tensors[use].copy_(torch.arange(tensors[use].numel()).view(tensors[use].shape))

    monkeypatch.setattr(cudnn, "_execute", execute)
    q, k, v = (torch.randn(heads, 18, 16).transpose(0, 1) for heads in (4, 2, 2))
    if not by_heads:
        q, k, v = (each.contiguous() for each in (q, k, v))
    bounds = bounds_of([11, 7])
    out, lse = cudnn.attention(q, k, v, bounds, sizes([11, 7]))
    grads = cudnn.attention_backward(torch.ones_like(out), q, k, v, out, lse, bounds, sizes([11, 7]))
    assert torch.equal(given[0][cudnn._Use.K], k) and torch.equal(given[1][cudnn._Use.OUT], out)
    for of, found in zip((q, q, k, v), (out, *grads), strict=True):
        assert found.stride() == torch.empty_like(of).stride() == of.stride()
        assert torch.equal(found, torch.arange(of.numel()).view(of.shape).to(of.dtype))


@pytest.mark.parametrize(("version", "used"), [("1.16.0", True), ("1.26.1", True), ("1.15.0", False), ("1.27", False)])
def test_other_versions_of_the_package_are_not_used(version: str, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = ModuleType("cudnn")
    monkeypatch.setitem(sys.modules, "cudnn", installed)
    monkeypatch.setattr(cudnn.importlib.metadata, "version", {"nvidia-cudnn-frontend": version}.__getitem__)
    assert cudnn._cudnn.__wrapped__() is (installed if used else None)


def test_a_machine_without_a_gpu_has_none() -> None:
    assert not cudnn._present(torch.device("cpu"))


@needs_it
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 300, 5000])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (8, 2, 128), (3, 1, 80)])
def test_attention_and_its_gradients_are_those_of_a_block_mask(
    heads: int, kv_heads: int, size: int, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "LEAST_WORK", 0)
    lengths = [1030, 1, 700, 1300, 17]
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), each, size) for each in (heads, kv_heads, kv_heads, heads)]
    *inputs, direction = (torch.randn(shape, generator=generator).to(HERE, dtype) for shape in shapes)
    packing = PackedSequences.of(np.concatenate([[0], np.cumsum(lengths)]), HERE)
    assert cudnn.sizes_of(*inputs[:2], packing.cu_seqlens, packing.longest, 0.1, 0) is not None
    mine, exact = ([x.detach().to(of).requires_grad_() for x in inputs] for of in (dtype, torch.float32))
    got, wanted = (
        packed_attention(*mine, packing, window=window),
        by_the_book(*exact, lengths, size**-0.5, window=window),
    )
    gradients = zip(
        torch.autograd.grad(got, mine, direction), torch.autograd.grad(wanted, exact, direction.float()), strict=True
    )
    for found, right in ((got, wanted), *gradients):
        assert float((found.float() - right).detach().norm() / right.detach().norm()) < 0.01


@needs_it
def test_every_other_layout_of_memory_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "LEAST_WORK", 0)
    q, k, v = torch.randn(3, 2, 1200, 64, device=HERE, dtype=torch.bfloat16).unbind()
    packing = PackedSequences.of(np.array([0, 1100, 1200]), HERE)
    apart = [x.transpose(0, 1) for x in (q, k, v)]  # by heads, as transformers hands them over
    one = packed_attention(*apart, packing)
    assert torch.equal(one, packed_attention(*(x.contiguous() for x in apart), packing))
