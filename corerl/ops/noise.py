"""Random numbers as a pure function of (key, counter): no generator state, so the order of calls does not matter.

The mixing is SplitMix64's (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"): element c of
the stream of key k is the output of a SplitMix64 generator seeded with mix(k), after c + 1 steps. 64-bit integers wrap
in numpy and torch, on every device, so the bits are equal everywhere; values that take logarithms are equal up to
rounding.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch

from corerl.types import IntArray

Int64 = TypeVar("Int64", IntArray, torch.Tensor)


def _signed(value: int) -> int:
    """The int64 with the same 64-bit pattern."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


GAMMA = _signed(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def mix(z: Int64) -> Int64:
    """SplitMix64's output function, a bijection of int64; each input bit flips half of the output bits on average.

    `>>` keeps the sign of an int64, so each shift is masked into a logical one, as in the paper.
    """
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _FIRST
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _SECOND
    return z ^ ((z >> 31) & (2**33 - 1))


def hash_keys(*parts: int | IntArray) -> IntArray:
    """[R] keys from parts that are numbers or arrays [R]; the parts' order and count matter."""
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(part, dtype=np.int64)) for part in parts))
    keys = mix(np.full(columns[0].shape, len(parts), dtype=np.int64))
    for column in columns:
        keys = mix((keys ^ mix(column + GAMMA)) + GAMMA)
    return keys


def hash_key(*parts: int) -> int:
    """One key from int64 numbers."""
    return int(hash_keys(*parts)[0])


def gumbel(keys: torch.Tensor, position: int | torch.Tensor, vocab: int) -> torch.Tensor:
    """[R, V] float32 standard Gumbel noise for the token at `position`, one number or [R], in each row.

    argmax(logprobs + gumbel) is a draw from the distribution (Gumbel 1954; Maddison et al. 2014, "A* sampling").
    """
    first = torch.as_tensor(position, device=keys.device).reshape(-1, 1) * vocab
    counters = first + torch.arange(vocab, device=keys.device)
    # In float64, since float32 would cut the tail at 2^-24; in place, since [R, V] is sampling's largest tensor.
    return unit(keys[:, None], counters).log_().neg_().log_().neg_().float()


def unit(keys: int | torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Uniform float64 in (0, 1) for each (key, counter), int64 on one device, broadcast against each other. They are 52
    random bits plus one half, so that neither end is ever reached."""
    bits = mix(mix(torch.as_tensor(keys, device=counters.device)) + (counters + 1) * GAMMA)
    return (((bits >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52


def normal(key: int, counters: torch.Tensor) -> torch.Tensor:
    """Standard normal float32 in the shape of `counters` (int64), by Box & Muller (1958)."""
    radius = (-2.0 * unit(key, 2 * counters).log()).sqrt()
    angle = (2.0 * math.pi) * unit(key, 2 * counters + 1)
    return (radius * angle.cos()).float()
