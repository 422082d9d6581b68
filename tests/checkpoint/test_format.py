from __future__ import annotations

import zlib

import pytest
import torch

from corerl.checkpoint import format as layout
from corerl.checkpoint.format import checksum, checksums

PIECE = layout.PIECE // 4  # values


@pytest.mark.parametrize("shape", [(), (0,), (3,), (PIECE,), (PIECE + 1,), (2, PIECE - 3)])
def test_the_checksum_is_of_all_bytes(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert checksum(tensor) == (zlib.crc32(tensor.numpy().tobytes()), True)
    assert checksum(tensor.T if tensor.ndim == 2 else tensor)[0] == zlib.crc32(tensor.numpy().T.tobytes())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, 2 * PIECE + 6])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(value: float, at: int) -> None:
    tensor = torch.ones(2 * PIECE + 7)
    tensor[at] = value
    assert checksum(tensor) == (zlib.crc32(tensor.numpy().tobytes()), False)


def test_the_largest_float_is_finite_and_no_other_dtype_is_asked() -> None:
    assert checksum(torch.full((2,), torch.finfo(torch.float32).max))[1]
    assert checksum(torch.tensor([torch.inf], dtype=torch.bfloat16))[1]


@pytest.mark.parametrize("threads", [1, 3])
def test_each_tensor_has_its_own_answer_whatever_the_number_of_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    tensors = {str(size): torch.full((size,), float(size)) for size in (1, PIECE + 5, 7, 0, 300)}
    tensors["7"][3] = torch.nan
    found = checksums(tensors)
    assert list(found) == list(tensors)
    assert found == {name: (zlib.crc32(tensor.numpy().tobytes()), name != "7") for name, tensor in tensors.items()}
