"""Divide a request's rows among replicas: evenly, but a row goes to the replica that already holds its prefix."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from corerl.engines.base import GenerateRequest, Generation
from corerl.engines.continuation import split
from corerl.types import IntArray

Replica = TypeVar("Replica", bound=Hashable)

SLACK = 1.5  # limit, in even parts, on the rows given to a replica for holding their prefixes
REMEMBERED = 2**17  # prefixes; nothing else limits their number while weights stay the same
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, with well-spread bits: its powers make a row's prefix hashes differ


class PrefixRouter(Generic[Replica]):
    """Decides which replica samples which rows. For one thread.

    A replica caches the keys and values of what it has read and generated until its weights change. Hence rows of one
    prompt stay together if parts then stay even to within a prompt; and a row that starts with a prompt, or a prompt
    and its response, that a replica has seen goes there again, such as the next turn of a conversation. Evenness is
    counted in rows, including those still being generated.
    """

    def __init__(self) -> None:
        self._busy: Counter[Replica] = Counter()  # rows in progress on each replica
        self._homes: dict[tuple[int, int], Replica] = {}  # (length, hash) of a prefix -> the replica that has read it
        self._lengths: list[int] = []  # of these prefixes, ascending, each once

    def divide(self, request: GenerateRequest, replicas: Sequence[Replica]) -> dict[Replica, IntArray]:
        """The rows [n] for each replica that gets any, in ascending order."""
        if len(replicas) == 1:
            return {replicas[0]: np.arange(len(request))}
        load = [self._busy[replica] for replica in replicas]
        even = -(-(len(request) + sum(load)) // len(replicas))
        given: list[list[int]] = [[] for _ in replicas]
        left = list(range(len(request)))
        sums = _sums(_read(request), request.offsets)
        if self._homes:
            left = []
            place: dict[Replica | None, int] = {replica: i for i, replica in enumerate(replicas)}
            for row, (start, stop) in enumerate(pairwise(request.offsets.tolist())):
                i = place.get(self._home(sums[start + 1 : stop + 1] - sums[start]), -1)
                if i >= 0 and load[i] + 1 <= SLACK * even:
                    given[i].append(row)
                    load[i] += 1
                else:
                    left.append(row)
        whole = list(zip(np.diff(request.offsets).tolist(), np.diff(sums[request.offsets]).tolist(), strict=True))
        prompts, room = [whole[row] for row in left], _fill(load, len(left))
        start = ideal = 0
        for rows, more in zip(given, room, strict=True):
            ideal += more
            stop = max(start, _between(prompts, ideal, even))
            rows += left[start:stop]
            start = stop
        return {replica: np.array(sorted(rows)) for replica, rows in zip(replicas, given, strict=True) if rows}

    @contextmanager
    def in_progress(self, rows: Mapping[Replica, int]) -> Iterator[Callable[[Replica], None]]:
        """Count these rows per replica as in progress; yields a function that ends that for one replica early."""
        left = dict(rows)
        self._busy.update(left)
        try:
            yield lambda replica: self._busy.subtract({replica: left.pop(replica, 0)})
        finally:
            self._busy.subtract(left)
            left.clear()

    def remember(self, replica: Replica, request: GenerateRequest, generation: Generation) -> None:
        """Remember that the replica has read each row's prompt, and its response."""
        prompts = np.diff(request.offsets)
        prompt = np.diff(_sums(_read(request), request.offsets)[request.offsets])
        response = np.diff(_sums(generation.tokens, generation.offsets, after=prompts)[generation.offsets])
        sizes = np.concatenate([prompts, prompts + np.diff(generation.offsets)]).tolist()
        hashes = np.concatenate([prompt, prompt + response]).tolist()
        beginnings = {each: replica for each in zip(sizes, hashes, strict=True) if each[0]}
        if len(self._homes) + len(beginnings) > REMEMBERED:
            self.forget()
        self._homes |= beginnings
        for size in {size for size, _ in beginnings}:
            at = bisect_left(self._lengths, size)
            if self._lengths[at : at + 1] != [size]:
                self._lengths.insert(at, size)

    def forget(self) -> None:
        """Forget all prefixes, because the weights have changed."""
        self._homes.clear()
        self._lengths.clear()

    def _home(self, hashes: IntArray) -> Replica | None:
        """The replica that has read the longest prefix of a row, given the hashes of its prefixes."""
        for at in range(bisect_right(self._lengths, len(hashes)) - 1, -1, -1):
            size = self._lengths[at]
            if (home := self._homes.get((size, int(hashes[size - 1])))) is not None:
                return home
        return None


def in_order(request: GenerateRequest, parts: Sequence[tuple[IntArray, Generation]]) -> Generation:
    """Merge parts, each a (rows, generation) pair, into one generation in the request's order."""
    rows = np.concatenate([named for named, _ in parts])
    together = Generation.concatenate([part for _, part in parts])
    if np.array_equal(rows, np.arange(len(rows))):
        return together
    single = split(together, [request.row_range(row, row + 1) for row in rows])
    return Generation.concatenate([single[place] for place in np.argsort(rows)])


def _fill(load: Sequence[int], rows: int) -> list[int]:
    """How many of `rows` more rows each replica takes so that loads end up as even as possible."""
    heap = [(each, i) for i, each in enumerate(load)]
    heapq.heapify(heap)
    taken = [0] * len(load)
    for _ in range(rows):
        each, i = heap[0]
        heapq.heapreplace(heap, (each + 1, i))
        taken[i] += 1
    return taken


def _between(prompts: Sequence[tuple[int, int]], at: int, rows: int) -> int:
    """Where to cut without separating one prompt's rows: the place nearest to `at`, or `at` itself if the prompt there
    has more than `rows` rows."""
    low = high = at
    while 0 < low < len(prompts) and prompts[low] == prompts[low - 1]:
        low -= 1
    while 0 < high < len(prompts) and prompts[high] == prompts[high - 1]:
        high += 1
    if high - low > rows:
        return at
    return low if at - low <= high - at else high


def _read(request: GenerateRequest) -> IntArray:
    """[n] the tokens; those that stand for pictures differ from picture to picture."""
    if not request.pictures:
        return request.tokens
    own = np.array([0, *(int(picture.id[:8], 16) for picture in request.pictures)])
    return request.tokens + own[request.picture]


def _sums(tokens: IntArray, offsets: IntArray, *, after: IntArray | int = 0) -> NDArray[np.uint64]:
    """[n + 1] sums whose differences within a row are hashes: from its start to a token, of the prefix that ends before
    it. If tokens [n] are what comes `after` so many others of each row, hashes of both parts are added."""
    lengths = np.diff(offsets)
    within = np.arange(len(tokens)) - np.repeat(offsets[:-1] - after, lengths)
    powers = np.cumprod(np.full(int(within.max(initial=0)) + 1, MULTIPLIER))
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum((tokens + 1).astype(np.uint64) * powers[within])])
