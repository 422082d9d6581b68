from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from corerl.errors import ModelError
from corerl.models.build import build_on_meta
from corerl.models.names import HFBox, hf_boxes, local_chunks
from corerl.weights.chunks import holes
from corerl_testing.models import KINDS, tiny_config


def on_disk(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}


def test_views_of_parameters_are_the_tensors_on_disk(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    boxes, wanted = hf_boxes(model), on_disk(tiny_model)
    params = dict(model.named_parameters())
    views = {box.name: box.view(params[name].detach()) for name, found in boxes.items() for box in found}
    assert views.keys() == wanted.keys()
    assert all(torch.equal(views[name], tensor) for name, tensor in wanted.items())
    assert all(box.shape == wanted[box.name].shape for found in boxes.values() for box in found)
    storages = {p.untyped_storage().data_ptr() for p in params.values()}
    assert all(view.untyped_storage().data_ptr() in storages for view in views.values())


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_any_cut_cover_every_tensor_once(kind: str) -> None:
    torch.manual_seed(0)
    model = build_on_meta(tiny_config(kind), dtype=torch.float32, attention="sdpa")
    boxes = hf_boxes(model)
    shapes = {box.name: box.shape for found in boxes.values() for box in found}
    wanted = {name: torch.randn(shape) for name, shape in shapes.items()}
    chunks = []
    for name, param in model.named_parameters():
        full = torch.full(param.shape, torch.nan)
        for box in boxes[name]:
            box.view(full).copy_(wanted[box.name])
        # every dim in three uneven parts: no cut falls on an expert's or a projection's edge
        cuts = [[0, size // 3, size // 2 + 1, size] if size > 3 else [0, size] for size in param.shape]
        for corner in itertools.product(*(itertools.pairwise(c) for c in cuts)):
            offsets, sizes = [low for low, _ in corner], [high - low for low, high in corner]
            local = full[tuple(slice(low, high) for low, high in corner)]
            chunks += local_chunks(boxes[name], offsets, sizes, local, replica=True)
    assert holes(shapes, [(chunk.name, chunk.box) for chunk in chunks]) == {}
    for chunk in chunks:
        part = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        assert chunk.shape == shapes[chunk.name] and chunk.replica
        assert torch.equal(chunk.view, wanted[chunk.name][part])


def test_a_local_tensor_of_another_shape_is_refused() -> None:
    with pytest.raises(ModelError, match=r"has shape \[2\], expected \[3\]"):
        local_chunks([HFBox("w", (4,), (0,), (0,))], (0,), (3,), torch.zeros(2))


class Doubled:
    """A stand-in for transformers' way back to its files."""

    def __init__(self, change: str) -> None:
        self.change = change

    def __call__(self, model: object, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = "model.layers.0.mlp.up_proj.weight"
        match self.change:
            case "computed":
                state[name] = state[name] * 2
            case "flattened":
                state[name] = state[name].flatten()
            case "dropped":
                state[name] = state[name][1:]
            case "doubled":
                state["again"] = state[name][:1]
        return state


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("computed", "is computed from"),
        ("flattened", "is computed from"),
        ("dropped", "do not cover"),
        ("doubled", "do not cover"),
    ],
)
def test_what_is_no_exact_cover_by_boxes_is_refused(
    change: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corerl.models.names.revert_weight_conversion", Doubled(change))
    with pytest.raises(ModelError, match=expected):
        hf_boxes(build_on_meta(tiny_config("llama"), dtype=torch.float32, attention="sdpa"))
