from __future__ import annotations

import pytest
import torch

from corerl.weights.adapters import adapted, adapters_of, add_products_, is_adapter, plan_merges
from corerl.weights.manifest import build_manifest

UP = "model.layers.0.mlp.up_proj.weight"
A, B = adapters_of(UP)


def test_names_are_those_of_peft_and_lead_back() -> None:
    assert A == "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    assert B == "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    assert adapted(A) == adapted(B) == UP
    assert is_adapter(A) and is_adapter(B)
    others = [
        UP,
        UP.removesuffix(".weight"),
        A.removeprefix("base_model.model."),
        f"{A}.grad",
        "base_model.model.x.bias",
    ]
    assert not any(map(is_adapter, others))


# As in files of experts, whose matrices alternate; q_proj's distance changes after the second layer.
SHAPES = {
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(3)
        for name, shape in (
            ("self_attn.q_proj", (6, 4)),
            ("norm", (4 + layer // 2,)),
            *((f"mlp.experts.{expert}.{part}_proj", (5, 4)) for expert in range(4) for part in ("gate", "up")),
        )
    },
    "model.layers.3.self_attn.q_proj.weight": (6, 4),
    "lm_head.weight": (7, 4),
}
RANK, SCALE = 3, 7 / 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "adapters in reverse"])
def test_merging_adds_scale_b_a_to_adapted_weights_alone(dtype: str, reverse: bool) -> None:
    adapted_names = [name for name in SHAPES if "_proj" in name]
    shapes = [
        shape
        for name in (adapted_names[::-1] if reverse else adapted_names)
        for shape in zip(adapters_of(name), ((RANK, 4), (SHAPES[name][0], RANK)), strict=True)
    ]
    (weights,), (adapters,) = (
        build_manifest(each, dtype=dtype, bucket_bytes=2**20).buckets for each in (SHAPES.items(), shapes)
    )
    torch.manual_seed(5)
    before, of_adapters = torch.randn(weights.numel).to(getattr(torch, dtype)), torch.randn(adapters.numel)
    around = torch.full((weights.numel + 2,), 9.0, dtype=before.dtype)  # a part of the sender's memory
    after = around[1:-1].copy_(before)
    merges = plan_merges(weights, adapters, SCALE)
    for merge in merges:
        merge.add(after, of_adapters)

    held, sent, found = weights.views(before), weights.views(after), adapters.views(of_adapters)
    for name, weight in held.items():
        a, b = (found.get(each) for each in adapters_of(name))
        wanted = weight if a is None or b is None else (weight + SCALE * (b @ a)).to(weight.dtype)
        torch.testing.assert_close(sent[name], wanted, rtol=1e-6 if dtype == "float32" else 0.004, atol=1e-6)
        assert (a is None) == torch.equal(sent[name], weight), name
    assert (around[[0, -1]] == 9.0).all()
    # At once: q_proj of the first three layers, then of the last; each layer's gate projections, and its up ones.
    counts = [merge.weights.count for merge in merges]
    assert sorted(counts) == ([1] * len(adapted_names) if reverse else [1, 3, 4, 4, 4, 4, 4, 4]), counts


def test_a_product_of_many_matrices_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    weights, b, a = torch.randn(5, 6, 4), torch.randn(5, 6, RANK), torch.randn(5, RANK, 4)
    wanted = weights + SCALE * (b @ a)
    sizes = []

    def counted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        sizes.append(len(left))
        return left @ right

    monkeypatch.setattr(torch, "bmm", counted)
    monkeypatch.setattr("corerl.weights.adapters.MOST", 50)
    add_products_(weights, b, a, scale=SCALE)
    torch.testing.assert_close(weights, wanted)
    assert sizes == [2, 2, 1]
