from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from corerl.ops.transfer import upload
from corerl.types import Array

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
ARRAYS = [
    np.arange(12, dtype=np.int64).reshape(3, 4),
    np.arange(12, dtype=np.float32).reshape(3, 4).T,
    np.array([True, False, True]),
    np.zeros((0, 5), dtype=np.int16),
    np.arange(9, dtype=np.int32)[::2],
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype} {array.shape}")
def test_a_copy_has_the_arrays_shape_dtype_and_values(device: str, array: Array) -> None:
    there = upload(array, device)
    assert there.device.type == device
    found = there.cpu().numpy()
    assert found.dtype == array.dtype and found.shape == array.shape
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("device", DEVICES)
def test_the_array_may_be_read_only_and_change_afterwards(device: str) -> None:
    array = np.arange(5)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        there = upload(array, device)
    array.flags.writeable = True
    array[:] = -1
    assert there.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_host_does_not_wait_for_what_the_device_has_to_do_before() -> None:
    upload(np.zeros(2**20, np.float32), "cuda")  # pinned memory is there now
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles, of which a GPU has no 2e9 a second: about a second
    done = torch.cuda.Event()
    done.record()
    there = upload(np.ones(2**20, np.float32), "cuda")
    assert not done.query()
    assert float(there.sum()) == 2**20
