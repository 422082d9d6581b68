"""The weights that a role with adapters does not train: no checkpoint holds them, only what identifies them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from corerl.errors import CheckpointError
from corerl.weights.chunks import Chunk
from corerl.weights.plain import gather_plain
from corerl.weights.verify import bit_sums


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


def require_same(told: object, own: str, *, where: str) -> None:
    """Raise CheckpointError if adapters were trained beside other weights than this role's."""
    if told != own:
        raise CheckpointError(
            f"{where}: its adapters belong to other weights (digest {told or 'none'}) than this model's ({own}); "
            "resume with the model.path, or the run.seed of random weights, that they were trained with, and in "
            "float16 if that was their train.precision"
        )


def require_same_scale(told: object, own: float, *, where: str) -> None:
    """Raise CheckpointError if adapters were trained with another factor before their product."""
    if told != own:
        raise CheckpointError(
            f"{where}: its adapters were trained with a scale of {told} (alpha / rank, or with rslora alpha / root of "
            f"rank), this run's is {own}; resume with the lora.alpha and lora.rslora that they were trained with"
        )
