"""Random initial weights, each a function of seed, name and index, so that a rank draws only its own part."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from corerl.errors import ModelError
from corerl.models.initial import Constant, Fixed, Initial, Normal, Uniform
from corerl.ops.noise import hash_key, normal, unit
from corerl.weights.chunks import within

NOTHING: Mapping[str, Initial] = {}

# Values drawn at once. Each takes several int64 and float64 temporaries: on a CPU they fit in cache, on a GPU they
# briefly take 0.8 GiB.
VALUES = {"cpu": 2**18, "cuda": 2**24}


class RandomSource:
    """A `weights.chunks.TensorSource` of random float32 weights, by HF name.

    Tensors begin as `initials` says (`models.initial`). Of the others, those of more than one dim are normal(0,
    config.initializer_range), norm weights one, biases zero; raises ModelError on any other tensor of one dim. Weights
    are drawn and returned on `device`: a CPU core draws about 30 million values a second, which takes minutes for a
    large model. A GPU's values are equal up to rounding.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        shapes: Mapping[str, Sequence[int]],
        seed: int,
        device: torch.device | str = "cpu",
        *,
        initials: Mapping[str, Initial] = NOTHING,
    ) -> None:
        self._device = torch.device(device)
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._seed = seed
        std = float(getattr(config, "initializer_range", 0.02))
        self._initials = {name: initials.get(name) or _usual(name, shape, std) for name, shape in self._shapes.items()}

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        initial = self._initials[name]
        if isinstance(initial, Constant):
            return torch.full(tuple(sizes), initial.value, device=self._device)
        if isinstance(initial, Fixed):
            box = (tuple(offsets), tuple(sizes))
            return initial.values[within(box, ((0,) * len(sizes), self._shapes[name]))].float().to(self._device)
        out = torch.empty(tuple(sizes), device=self._device)
        key = hash_key(self._seed, _name_key(name))
        shape = self._shapes[name]
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
            out[low : low + len(rows)] = _drawn(initial, key, counters)
        return out


def _usual(name: str, shape: tuple[int, ...], std: float) -> Initial:
    if len(shape) > 1:
        return Normal(0.0, std)
    if name.endswith((".weight", ".bias")):
        return Constant(1.0 if name.endswith(".weight") else 0.0)
    raise ModelError(f"no initialization is known for {name!r} {list(shape)}; set model.path to load weights instead")


def _drawn(initial: Normal | Uniform, key: int, counters: Tensor) -> Tensor:
    """float32 values in the shape of `counters`, a function of them and of the key."""
    if isinstance(initial, Uniform):
        return (initial.low + (initial.high - initial.low) * unit(key, counters)).float()
    if initial.most < 6 * initial.std:  # beyond, float32 has no values to cut off
        edge = 0.5 * math.erfc(initial.most / initial.std / math.sqrt(2))  # probability of each tail
        inside = edge + (1 - 2 * edge) * unit(key, counters)
        return (initial.mean + initial.std * math.sqrt(2) * torch.erfinv(2 * inside - 1)).float()
    return normal(key, counters) * initial.std + initial.mean


def _name_key(name: str) -> int:
    """An int64 from a name that is equal in every process, unlike hash()."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
