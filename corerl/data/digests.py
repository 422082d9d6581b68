"""Digests of rows: 64 bits that say whether a row has been seen, whatever file and place it comes from."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from corerl.types import IntArray, UIntArray


def _plain(value: Any) -> str:
    try:
        return xxh3_64_hexdigest(value)  # of bytes and arrays
    except (TypeError, ValueError, BufferError):
        return str(value)


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str).encode
_with_bytes = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_plain).encode


def digest(row: Mapping[str, Any], *keys: str, pictures: bool = False) -> int:
    """Of a row without nulls (an object of a parquet file has one where a JSON object lacks a field), without lists of
    numbers and, unless its `pictures` are shown, without bytes; and of `keys`, the fields of prompt, answer and tools:
    asked or scored by other fields it is another row."""
    if pictures:
        return xxh3_64_intdigest(_with_bytes([keys, row]).encode())
    held = {key: value for key, value in row.items() if key in keys or _counts(value)}
    return xxh3_64_intdigest(_canonical([keys, held]).encode())


def _counts(value: Any) -> bool:
    """Whether it is neither a list of numbers, at any depth of lists, or of nothing, nor bytes or what has some, as a
    picture."""
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    if isinstance(first, dict):
        return not any(isinstance(each, bytes) for each in first.values())
    return not isinstance(first, bytes) and not (
        isinstance(value, list) and (first == [] or isinstance(first, int | float))
    )


def digest_of_question(text: str, references: Sequence[Any]) -> int:
    """Of a text and the pictures that it is asked of; without any, as of the text."""
    asked = xxh3_64_intdigest(text.strip().encode(errors="surrogatepass"))
    return xxh3_64_intdigest(_with_bytes([asked, references]).encode()) if references else asked


def held_out_order(digests: UIntArray, seed: int) -> IntArray:
    """The order in which rows are held out: it depends on the rows and the seed, not on the rows' places."""
    mask = np.random.default_rng([seed, 0]).integers(2**64, dtype=np.uint64)
    return np.argsort(digests ^ mask, kind="stable")


def packed(digests: UIntArray) -> str:
    """As text for a checkpoint: 11 bytes for each, and few for numbers in a row."""
    steps = np.diff(digests, prepend=np.uint64(0)).astype("<u8")  # modulo 2**64, as the sum below
    return base64.b64encode(zlib.compress(steps.tobytes(), 1)).decode()
