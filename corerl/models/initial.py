"""Random weights that are initialized as transformers does it, any box of them alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from unittest import mock

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import init
from transformers import PreTrainedConfig, initialization

from corerl.errors import ModelError
from corerl.models.build import build_on_meta, named_weights
from corerl.models.names import hf_boxes
from corerl.ops.noise import hash_key, normal, unit
from corerl.weights.adapters import A
from corerl.weights.chunks import within


@frozen
class Normal:
    """Normal values, none further than `most` from the mean."""

    mean: float
    std: float
    most: float = math.inf


@frozen
class Uniform:
    low: float
    high: float


@frozen
class Constant:
    value: float


@frozen(eq=False)
class Fixed:
    """Values that depend on the place, such as the logarithms of 1, 2, 3, ..."""

    values: Tensor  # of the whole tensor


Initial: TypeAlias = Normal | Uniform | Constant | Fixed


def initials(config: PreTrainedConfig, *, seed: int, pictures: bool = False) -> dict[str, Initial]:
    """How each tensor of the model is initialized, by HF name, as transformers does it; with `pictures` also of what
    reads them. What it leaves alone is left out, if it has two dims or more. `seed` is for vectors with random values.

    Raises ModelError if the model cannot be built.
    """
    recorded: dict[int, Initial] = {}
    with torch.random.fork_rng(devices=[]), _recording(recorded):
        torch.manual_seed(seed)
        model = build_on_meta(config, dtype=torch.float32, attention="eager", vectors=True, pictures=pictures)
    found: dict[str, Initial] = {}
    boxes = hf_boxes(model)
    for name, weight in named_weights(model).items():
        initial: Initial | None = recorded.get(id(weight)) if weight.is_meta else Fixed(weight.detach())
        if initial is None:
            continue
        for box in boxes[name]:
            found[box.name] = Fixed(box.view(initial.values)) if isinstance(initial, Fixed) else initial
    return found


@contextmanager
def _recording(recorded: dict[int, Initial]) -> Iterator[None]:
    """Record what transformers' initialization would do to tensors on meta: id -> initial values.

    Its functions are replaced in `transformers.initialization`, where the models of transformers 5 look them up; a
    model that samples its weights otherwise would be left out.
    """

    def recorder(name: str, initial: Any) -> Any:
        fill = getattr(initialization, name)

        def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not tensor.is_meta:
                result: Tensor = fill(tensor, *args, **kwargs)
                return result
            if (values := initial(tensor, *args, **kwargs)) is not None:
                recorded[id(tensor)] = values
            return tensor

        return record

    with mock.patch.multiple(initialization, **{name: recorder(name, initial) for name, initial in INITIALS.items()}):
        yield


def _scaled(tensor: Tensor, gain: float, mode: str) -> float:
    """The deviation of Glorot & Bengio 2010 and He et al. 2015: gain / sqrt(fan)."""
    fan_in, fan_out = init._calculate_fan_in_and_fan_out(tensor)
    fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[mode]
    return gain / math.sqrt(fan)


def _truncated(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, **_: Any
) -> Normal:
    return Normal(mean, std, most=min(b - mean, mean - a))


def _kaiming(tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu", **_: Any) -> float:
    return _scaled(tensor, init.calculate_gain(nonlinearity, a), mode)


def _evenly(std: float) -> Uniform:
    return Uniform(-math.sqrt(3) * std, math.sqrt(3) * std)


# transformers' functions -> the initial values of a tensor that they would fill.
INITIALS: dict[str, Any] = {
    "normal_": lambda tensor, mean=0.0, std=1.0, **_: Normal(mean, std),
    "trunc_normal_": _truncated,
    "uniform_": lambda tensor, a=0.0, b=1.0, **_: Uniform(a, b),
    "constant_": lambda tensor, val: Constant(val),
    "ones_": lambda tensor: Constant(1.0),
    "zeros_": lambda tensor: Constant(0.0),
    "kaiming_normal_": lambda tensor, *args, **kwargs: Normal(0.0, _kaiming(tensor, *args, **kwargs)),
    "kaiming_uniform_": lambda tensor, *args, **kwargs: _evenly(_kaiming(tensor, *args, **kwargs)),
    "xavier_normal_": lambda tensor, gain=1.0, **_: Normal(0.0, _scaled(tensor, gain, "fan_avg")),
    "xavier_uniform_": lambda tensor, gain=1.0, **_: _evenly(_scaled(tensor, gain, "fan_avg")),
    "copy_": lambda tensor, other: None if other.is_meta else Fixed(other.detach().expand_as(tensor)),
}


def adapter_initials(shapes: Mapping[str, Sequence[int]], init: str) -> dict[str, Initial]:
    """How new adapters begin, by their names, as PEFT's do: A [rank, in] uniform within 1 / sqrt(in), which is He et
    al. 2015 with a slope of sqrt(5), or normal with a deviation of 1 / rank; B zero."""
    return {name: _a(shape, init) if name.endswith(A) else Constant(0.0) for name, shape in shapes.items()}


def _a(shape: Sequence[int], init: str) -> Initial:
    rank, inputs = shape
    return Normal(0.0, 1 / rank) if init == "gaussian" else Uniform(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs))


NOTHING: Mapping[str, Initial] = {}

# Values sampled at once. Each takes several int64 and float64 temporaries: on a CPU they fit in cache, on a GPU they
# briefly take 0.8 GiB.
VALUES = {"cpu": 2**18, "cuda": 2**24}


class RandomSource:
    """A `weights.chunks.TensorSource` of random float32 weights, by HF name.

    Tensors begin as `initials` says (`models.initial`). Of the others, those of more than one dim are normal(0,
    config.initializer_range), norm weights one, biases zero; raises ModelError on any other tensor of one dim. Weights
    are sampled and returned on `device`: a CPU core samples about 30 million values a second, which takes minutes for a
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
        self._initials = {
            name: initials.get(name) or _default(name, shape, std) for name, shape in self._shapes.items()
        }

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
        own = hashlib.blake2b(name.encode(), digest_size=8).digest()  # equal in every process, unlike hash()
        key = hash_key(self._seed, int.from_bytes(own, "little", signed=True))
        shape = self._shapes[name]
        # Flat indices in the whole tensor, of the box's entries in row 0.
        indices = torch.zeros((), dtype=torch.int64, device=self._device)
        for dim in range(1, len(shape)):
            stride = math.prod(shape[dim + 1 :])
            places = torch.arange(offsets[dim], offsets[dim] + sizes[dim], device=self._device)
            indices = indices[..., None] + stride * places
        row = math.prod(shape[1:])
        step = max(1, VALUES[self._device.type] // max(1, indices.numel()))
        for low in range(0, sizes[0], step):
            rows = torch.arange(offsets[0] + low, offsets[0] + min(low + step, sizes[0]), device=self._device)
            counters = rows.view(-1, *(1,) * indices.dim()) * row + indices
            out[low : low + len(rows)] = _sampled(initial, key, counters)
        return out


def _default(name: str, shape: tuple[int, ...], std: float) -> Initial:
    if len(shape) > 1:
        return Normal(0.0, std)
    if name.endswith((".weight", ".bias")):
        return Constant(1.0 if name.endswith(".weight") else 0.0)
    raise ModelError(f"no initialization is known for {name!r} {list(shape)}; set model.path to load weights instead")


def _sampled(initial: Normal | Uniform, key: int, counters: Tensor) -> Tensor:
    """float32 values in the shape of `counters`, a function of them and of the key."""
    if isinstance(initial, Uniform):
        return (initial.low + (initial.high - initial.low) * unit(key, counters)).float()
    if initial.most < 6 * initial.std:  # beyond, float32 has no values to cut off
        edge = 0.5 * math.erfc(initial.most / initial.std / math.sqrt(2))  # probability of each tail
        inside = edge + (1 - 2 * edge) * unit(key, counters)
        return (initial.mean + initial.std * math.sqrt(2) * torch.erfinv(2 * inside - 1)).float()
    return normal(key, counters) * initial.std + initial.mean
