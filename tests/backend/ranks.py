"""What each of two ranks does in test_state.py."""

from __future__ import annotations

import torch
import torch.distributed as dist

from corerl.backend.state import digest_of_frozen
from corerl.weights.chunks import Chunk


def tensors() -> dict[str, torch.Tensor]:
    """All weights, equal in every process."""
    generator = torch.Generator().manual_seed(8)
    shapes: dict[str, tuple[int, ...]] = {"up": (7, 5), "down": (5, 7), "norm": (5,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def digest_of_halves() -> str:
    """Of weights whose rows are on two ranks, but for a vector that both have."""
    rank, group, chunks = dist.get_rank(), dist.group.WORLD, []
    for name, tensor in tensors().items():
        if tensor.dim() == 1:
            chunks.append(Chunk(name, tuple(tensor.shape), (0,), tuple(tensor.shape), tensor, replica=rank != 0))
        else:
            start, stop = ((0, 4), (4, len(tensor)))[rank]
            part = tensor[start:stop].clone()
            chunks.append(Chunk(name, tuple(tensor.shape), (start, 0), tuple(part.shape), part))
    return digest_of_frozen(chunks, group)
