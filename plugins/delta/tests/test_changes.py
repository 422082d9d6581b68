from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from corerl_delta import changes as module
from corerl_delta.changes import apply_changes, encode_changes


def restored(old: Any, new: Any) -> Any:
    data = encode_changes(old, new)
    assert data is not None and len(data) < new.nbytes
    bits = old.copy()
    apply_changes(data, bits)
    return bits


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("share", [0.0, 0.0003, 0.01, 0.3])
def test_the_new_bits_are_made_of_the_old_ones(dtype: type, share: float) -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, np.iinfo(dtype).max, 20_000, dtype, endpoint=True)
    other = rng.integers(0, np.iinfo(dtype).max, 20_000, dtype, endpoint=True)
    new = np.where(rng.random(20_000) < share, other, old)
    np.testing.assert_array_equal(restored(old, new), new)


EDGES = [[0], [9_999], [0, 9_999], [254], [255], [256], [0, 255], [0, 256], [0, 257], [509], [510]]


@pytest.mark.parametrize("positions", [*EDGES, [0, 1, 2, 9_998, 9_999]])
def test_elements_at_the_ends_and_at_any_distance_are_found(positions: list[int]) -> None:
    old = np.zeros(10_000, np.uint16)
    new = old.copy()
    new[positions] = 0xFFFF  # 1 less than 0
    np.testing.assert_array_equal(restored(old, new), new)


def test_blocks_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 64)
    old = np.arange(1000, dtype=np.uint32)
    new = old.copy()
    new[[63, 64, 127, 999]] = 7
    np.testing.assert_array_equal(restored(old, new), new)


def test_sparse_changes_take_few_bytes() -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 1_000_000, np.uint16)
    new = old + np.where(rng.random(1_000_000) < 0.01, rng.choice([1, -1], 1_000_000), 0).astype(np.uint16)
    data = encode_changes(old, new)
    assert data is not None and len(data) < 0.01 * new.nbytes


@pytest.mark.parametrize(("changed", "tried"), [(999, False), (666, False), (665, True)])  # 3 bytes each, of 1998
def test_dense_changes_are_not_encoded(changed: int, tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compressed: list[int] = []
    monkeypatch.setattr(module, "_encoded", lambda old, new: compressed.append(1) or bytes(new.nbytes))
    old = np.zeros(999, np.uint16)
    assert encode_changes(old, (np.arange(999) < changed).astype(np.uint16)) is None
    assert bool(compressed) is tried


def test_a_few_elements_are_not_worth_their_header() -> None:
    assert encode_changes(np.zeros(4, np.uint16), np.array([0, 0, 0, 1], np.uint16)) is None


def test_what_is_no_change_to_this_array_is_refused() -> None:
    old, new = np.zeros(1000, np.uint16), np.zeros(1000, np.uint16)
    new[999] = 1
    data = encode_changes(old, new)
    assert data is not None
    damaged = bytearray(data)
    damaged[20] ^= 1
    with pytest.raises(zlib.error):
        apply_changes(bytes(damaged), old.copy())
    with pytest.raises(zlib.error):
        apply_changes(data[:-1], old.copy())
    with pytest.raises(IndexError):
        apply_changes(data, old[:500].copy())
    with pytest.raises(ValueError, match="got changes for 1 blocks, but the array has 0"):
        apply_changes(data, old[:0].copy())
