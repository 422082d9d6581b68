from __future__ import annotations

import pytest
import torch

from corerl.weights.adapters import Adapters, adapted, adapters_of, is_adapter

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


def drawn(rows: int, columns: int, rank: int, size: float = 1.0) -> tuple[torch.Tensor, Adapters]:
    torch.manual_seed(5)
    tensors = {A: size * torch.randn(rank, columns), B: size * torch.randn(rows, rank)}
    return torch.randn(rows, columns), Adapters(tensors, 7 / 3)


def test_merging_adds_scale_b_a_to_adapted_weights_alone() -> None:
    weight, adapters = drawn(5, 4, rank=3)
    others = {"model.norm.weight": torch.randn(4), "model.layers.1.mlp.up_proj.weight": torch.randn(5, 4)}
    found = {name: each.clone() for name, each in {**others, UP: weight}.items()}
    adapters.merge(found)
    wanted = weight.double() + 7 / 3 * adapters.tensors[B].double() @ adapters.tensors[A].double()
    assert (found[UP] - wanted).abs().max() < 1e-6 * wanted.abs().max()
    assert (wanted - weight).abs().max() > 1
    assert all(torch.equal(found[name], each) for name, each in others.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_merge_into_16_bits_rounds_the_sum_once(dtype: torch.dtype) -> None:
    weight, adapters = drawn(64, 48, rank=4, size=0.02)
    weight = weight.to(dtype)
    merged = {UP: weight.clone()}
    adapters.merge(merged)
    change = 7 / 3 * adapters.tensors[B].double() @ adapters.tensors[A].double()
    wanted = weight.double() + change
    steps = torch.finfo(dtype).eps * wanted.abs()  # of a number just below a power of two; half as much rounds it
    assert ((merged[UP].double() - wanted).abs() <= 0.501 * steps).all()
    # A product that was rounded too, as when it is computed in 16 bits, is further away here and there.
    twice = weight + (7 / 3 * adapters.tensors[B].to(dtype) @ adapters.tensors[A].to(dtype))
    assert ((twice.double() - wanted).abs() > 0.501 * steps).any()
