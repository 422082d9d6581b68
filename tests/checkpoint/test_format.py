from __future__ import annotations

import zlib

import pytest
import torch

from corerl.checkpoint import format as layout
from corerl.checkpoint.format import checksum

PIECE = layout.PIECE // 4  # values


@pytest.mark.parametrize("shape", [(), (0,), (3,), (PIECE,), (PIECE + 1,), (2, PIECE - 3)])
def test_the_checksum_is_of_all_bytes(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert checksum(tensor) == (zlib.crc32(tensor.numpy().tobytes()), True)
    assert checksum(tensor.T if tensor.ndim == 2 else tensor)[0] == zlib.crc32(tensor.numpy().T.tobytes())
