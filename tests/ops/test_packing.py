from __future__ import annotations

import numpy as np
import pytest
import torch

from corerl.ops.packing import upload


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
