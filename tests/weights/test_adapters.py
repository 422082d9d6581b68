from __future__ import annotations

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
