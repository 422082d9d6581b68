"""Encode the difference between two arrays of bits compactly: which elements changed, and by how much.

The arrays are cut into independent blocks of `BLOCK` elements. Each is written as 8 bytes with its length, followed by
these parts, compressed with zlib:

    4 bytes               c, the number of changed elements
    c bytes, itemsize times   new minus old bits, as integers that wrap around: all lowest bytes, the next ones, ...
    the rest              steps: n < 255 skips n unchanged elements, then one changed; 255 only skips 255 elements

After an optimizer step at a small learning rate, most changed weights move to the next number up or down, a difference
of 1 or -1: about two bits when compressed, while a whole weight would hardly compress.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 2**22  # elements: bounds the temporaries, about 20 bytes for each that changed
LEVEL = 1  # zlib's: higher levels save little here and take several times as long
THREADS = min(8, os.cpu_count() or 1)  # numpy and zlib release the GIL
PASSED = 255
LENGTH = struct.Struct("<q")
COUNT = struct.Struct("<I")


def encode_changes(old: NDArray[Any], new: NDArray[Any]) -> bytes | None:
    """Encode the changes from `old` to `new`, unsigned integers [n] of the same dtype; None if not smaller than `new`.

    Not attempted if too many elements changed to be smaller before compression, such as 2 of 3 elements of 2 bytes.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        pairs = [(old[start : start + BLOCK], new[start : start + BLOCK]) for start in range(0, len(new), BLOCK)]
        changed = sum(pool.map(lambda pair: np.count_nonzero(pair[0] != pair[1]), pairs))
        if changed * (1 + new.itemsize) >= new.nbytes:
            return None
        blocks = list(pool.map(lambda pair: _encoded(*pair), pairs))
    data = b"".join(part for block in blocks for part in (LENGTH.pack(len(block)), block))
    return data if len(data) < new.nbytes else None


def apply_changes(data: bytes, bits: NDArray[Any]) -> None:
    """Turn the old bits, unsigned integers [n], into the new ones, in place. Raises ValueError, IndexError,
    struct.error or zlib.error if `data` does not encode changes to an array of this size."""
    blocks = list(_split(data))
    starts = range(0, len(bits), BLOCK)
    if len(blocks) != len(starts):
        raise ValueError(f"got changes for {len(blocks)} blocks, but the array has {len(starts)}")
    with ThreadPoolExecutor(THREADS) as pool:
        views = (bits[start : start + BLOCK] for start in starts)
        list(pool.map(_apply, blocks, views))


def _encoded(old: NDArray[Any], new: NDArray[Any]) -> bytes:
    positions = np.flatnonzero(old != new)
    passes, rests = np.divmod(np.diff(positions, prepend=-1) - 1, PASSED)
    ends = np.cumsum(passes + 1)
    steps = np.full(ends[-1] if len(ends) else 0, PASSED, np.uint8)
    steps[ends - 1] = rests
    by = np.ascontiguousarray(new[positions] - old[positions])
    planes = by.view(np.uint8).reshape(len(by), by.itemsize).T
    return zlib.compress(COUNT.pack(len(positions)) + planes.tobytes() + steps.tobytes(), LEVEL)


def _split(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size + length
        yield data[at - length : at]


def _apply(block: bytes, bits: NDArray[Any]) -> None:
    raw = zlib.decompress(block)
    (count,) = COUNT.unpack_from(raw)
    planes = np.frombuffer(raw, np.uint8, count * bits.itemsize, COUNT.size).reshape(bits.itemsize, count)
    steps = np.frombuffer(raw, np.uint8, offset=COUNT.size + planes.size)
    positions = np.cumsum(steps, dtype=np.int64)[steps < PASSED] + np.arange(count)
    bits[positions] += np.ascontiguousarray(planes.T).view(bits.dtype).reshape(count)
