"""Random initial weights, each a function of seed, name and index, so that a rank draws only its own part."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from corerl.errors import ModelError
from corerl.ops.noise import hash_key, normal

# Values drawn at once. Each takes several int64 and float64 temporaries: on a CPU they fit in cache, on a GPU they
# briefly take 0.8 GiB.
VALUES = {"cpu": 2**18, "cuda": 2**24}


class RandomSource:
    """A `weights.chunks.TensorSource` of random float32 weights, by HF name.

    Tensors of more than one dim are normal(0, config.initializer_range), norm weights one, biases zero. Raises
    ModelError on any other tensor of one dim. Weights are drawn and returned on `device`: a CPU core draws about 30
    million values a second, which takes minutes for a large model. A GPU's values are equal up to rounding.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        shapes: Mapping[str, Sequence[int]],
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._device = torch.device(device)
        self._std = float(getattr(config, "initializer_range", 0.02))
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._seed = seed
        for name, shape in self._shapes.items():
            if len(shape) < 2 and not name.endswith((".weight", ".bias")):
                raise ModelError(
                    f"no initialization is known for {name!r} {list(shape)}; set model.path to load weights instead"
                )

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        shape = self._shapes[name]
        if len(shape) < 2:
            return torch.full(tuple(sizes), 1.0 if name.endswith(".weight") else 0.0, device=self._device)
        out = torch.empty(tuple(sizes), device=self._device)
        key = hash_key(self._seed, _name_key(name))
        # Flat indices in the whole tensor, of the box's entries in row 0.
        indices = torch.zeros((), dtype=torch.int64, device=self._device)
        for dim in range(1, len(shape)):
            stride = math.prod(shape[dim + 1 :])
            own = torch.arange(offsets[dim], offsets[dim] + sizes[dim], device=self._device)
            indices = indices[..., None] + stride * own
        row = math.prod(shape[1:])
        step = max(1, VALUES[self._device.type] // max(1, indices.numel()))
        for low in range(0, sizes[0], step):
            rows = torch.arange(offsets[0] + low, offsets[0] + min(low + step, sizes[0]), device=self._device)
            counters = rows.view(-1, *(1,) * indices.dim()) * row + indices
            out[low : low + len(rows)] = normal(key, counters) * self._std
        return out


def _name_key(name: str) -> int:
    """An int64 from a name that is equal in every process, unlike hash()."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
