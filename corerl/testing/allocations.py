"""How much memory a block of code asks for: the largest piece, and the most that it held at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from attrs import define
from torch._C._profiler import _ExperimentalConfig


@define
class Allocations:
    """Bytes of host memory that torch allocated; all are 0 until the block is left."""

    largest: int = 0  # one allocation
    peak: int = 0  # held at once, above what was held before the block
    kept: int = 0  # still held when the block was left


@contextmanager
def allocations(*, maps: Collection[int] = ()) -> Iterator[Allocations]:
    """Watches all threads, and what C++ allocates: a collective's buffer may be freed by a thread of its own.

    `maps` are sizes that are not memory: those of files that safetensors maps, which torch reports as allocations too.
    """
    found = Allocations()
    config = _ExperimentalConfig(profile_all_threads=True)
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True, experimental_config=config) as profile:
        yield found
    results = profile.kineto_results
    assert results is not None
    events = sorted((event for event in results.events() if event.name() == "[memory]"), key=lambda e: e.start_ns())
    for event in events:
        size = int(event.nbytes())
        if abs(size) in maps:
            continue
        found.kept += size
        found.largest = max(found.largest, size)
        found.peak = max(found.peak, found.kept)
