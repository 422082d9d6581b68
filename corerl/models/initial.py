"""Learn how transformers begins each weight of a model, without drawing the large ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from unittest import mock

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import init
from transformers import PreTrainedConfig, initialization

from corerl.models.build import build_on_meta, named_weights
from corerl.models.names import hf_boxes


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


def initials(config: PreTrainedConfig, *, seed: int) -> dict[str, Initial]:
    """How each tensor of the model begins, by HF name, as transformers' own initialization says. What it does not speak
    of is left out, if it has two dims or more. `seed` is for vectors with random values.

    Raises ModelError if the model cannot be built.
    """
    begun: dict[int, Initial] = {}
    with torch.random.fork_rng(devices=[]), _listening(begun):
        torch.manual_seed(seed)
        model = build_on_meta(config, dtype=torch.float32, attention="eager", vectors=True)
    found: dict[str, Initial] = {}
    boxes = hf_boxes(model)
    for name, weight in named_weights(model).items():
        initial: Initial | None = begun.get(id(weight)) if weight.is_meta else Fixed(weight.detach())
        if initial is None:
            continue
        for box in boxes[name]:
            found[box.name] = Fixed(box.view(initial.values)) if isinstance(initial, Fixed) else initial
    return found


@contextmanager
def _listening(begun: dict[int, Initial]) -> Iterator[None]:
    """Note what transformers' initialization would do to tensors on meta: id -> how the tensor begins.

    Its functions are replaced in `transformers.initialization`, where the models of transformers 5 look them up; a
    model that drew its weights otherwise would be left out.
    """

    def noted(name: str, initial: Any) -> Any:
        do = getattr(initialization, name)

        def note(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not tensor.is_meta:
                result: Tensor = do(tensor, *args, **kwargs)
                return result
            if (begins := initial(tensor, *args, **kwargs)) is not None:
                begun[id(tensor)] = begins
            return tensor

        return note

    with mock.patch.multiple(initialization, **{name: noted(name, initial) for name, initial in BEGINS.items()}):
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


# transformers' functions -> how a tensor begins that they would fill.
BEGINS: dict[str, Any] = {
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
