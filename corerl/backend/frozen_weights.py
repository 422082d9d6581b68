"""The weights that a role with adapters does not train: no checkpoint holds them, only what identifies them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from corerl.errors import CheckpointError
from corerl.weights.checksums import bit_sums
from corerl.weights.chunks import Chunk
from corerl.weights.gather import gather_plain


def digest(chunks: Sequence[Chunk], group: ProcessGroup | None) -> str:
    """What identifies these weights of all ranks, however they are split, in float32 or in bfloat16; float16, which has
    fewer exponents, may round small ones to others. For each tensor, the bits of its values in bfloat16 are summed,
    which is blind to their order. Called on every rank."""
    own: dict[str, int] = {}
    for chunk in chunks:
        if not chunk.replica:
            own[chunk.name] = own.get(chunk.name, 0) + rounded_sum(chunk.view)
    ranks = [own] if group is None else gather_plain(own, group)
    names = {name for sums in ranks for name in sums}
    return of_sums({name: sum(sums.get(name, 0) for sums in ranks) for name in names})


def rounded_sum(values: torch.Tensor) -> int:
    """The sum of the bits of `values` in bfloat16."""
    return bit_sums({"": values.to(torch.bfloat16)})[""]


def of_sums(sums: Mapping[str, int]) -> str:
    """The digest of whole tensors by name -> `rounded_sum`."""
    lines = [f"{name} {sums[name] % 2**64:x}" for name in sorted(sums)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def require_same(extra: Mapping[str, Any], own: str, scale: float, *, where: str) -> None:
    """Raise CheckpointError if adapters were trained with weights of another digest, or with another scale."""
    if (digest := extra.get("frozen_weights")) != own:
        raise CheckpointError(
            f"{where}: its adapters belong to other weights (digest {digest or 'none'}) than this model's ({own}); "
            "resume with the model.path, or the run.seed of random weights, that they were trained with, and in "
            "float16 if that was their train.precision"
        )
    if (before := extra.get("lora_scale")) != scale:
        raise CheckpointError(
            f"{where}: its adapters were trained with a scale of {before} (alpha / rank, or with rslora alpha / root "
            f"of rank), this run's is {scale}; resume with the lora.alpha and lora.rslora that they were trained with"
        )
