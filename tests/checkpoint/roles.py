"""Hand-made ranks for the checkpoint tests: one model, cut in different ways."""

from __future__ import annotations

import torch

from corerl.weights.chunks import Chunk, flat_range_boxes, within

KEYS = ("master", "exp_avg", "exp_avg_sq")
SHAPES: dict[str, tuple[int, ...]] = {"embed": (6, 4), "norm": (4,), "q": (3, 2, 5), "scale": ()}
STATE = {"rollout_step": 5, "optimizer_step": 10, "position": {"epoch": 1, "index": 7}}


def whole(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """key -> name -> tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {key: {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for key in KEYS}


def cut(rank: int, world: int, tensors: dict[str, dict[str, torch.Tensor]]) -> dict[str, list[Chunk]]:
    """Each tensor's elements in equal flat ranges over the ranks; `scale` a replica but on the last rank."""
    return {
        key: [
            Chunk(
                name,
                tuple(tensor.shape),
                *box,
                tensor[within(box, ((0,) * tensor.ndim, tuple(tensor.shape)))].clone(),
                replica=name == "scale" and rank != world - 1,
            )
            for name, tensor in of_key.items()
            for box in (
                flat_range_boxes(tensor.shape, 0, 1)
                if tensor.ndim == 0
                else flat_range_boxes(
                    tensor.shape, tensor.numel() * rank // world, tensor.numel() * (rank + 1) // world
                )
            )
        ]
        for key, of_key in tensors.items()
    }
