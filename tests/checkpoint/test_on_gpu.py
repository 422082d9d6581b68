"""Copies of what is on a GPU: pinned memory that is written over, and what is waited for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from corerl.checkpoint.copies import StateCopies
from corerl.weights.chunks import Chunk

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LARGE = (2**14, 2**13)  # 512 MiB: copying takes longer than launching what follows


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Where copies are kept: files on a disk cannot be pinned."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def test_a_copy_is_of_the_state_as_kernels_left_it_that_were_not_waited_for_and_as_no_later_one_changes_it(
    in_memory: Path,
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    held = {
        "large": torch.zeros(LARGE, device=device),
        "across": torch.zeros((300, 200), device=device).T,
        "half": torch.zeros((1000, 3), device=device, dtype=torch.bfloat16),
        "scalar": torch.zeros((), device=device),
        "host": torch.zeros(77),
    }
    chunks = [Chunk(name, tuple(view.shape), (0,) * view.ndim, tuple(view.shape), view) for name, view in held.items()]
    copies, side = StateCopies(device), torch.cuda.Stream(device)
    for step in range(1, 6):
        directory = in_memory / str(step % 2)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for view in held.values():
                view.fill_(step)
        copies.begin(directory, 0, {"master": chunks}, {"rng": torch.full((9,), step, device=device)})
        beside = [torch.empty_like(held["large"]).fill_(step) for _ in range(3)]  # what passes do meanwhile
        copies.settle()
        for view in held.values():
            view.fill_(-1)
        assert copies.complete(wait=True)
        found = load_file(directory / "rank-00000.safetensors")
        assert found.keys() == {
            *(f"master/{chunk.name}@{','.join('0' * chunk.view.ndim)}" for chunk in chunks),
            "extra/0",
        }
        assert all(bool((each == step).all()) for each in found.values())
        assert all(bool((each == step).all()) for each in beside)
    memory = [each.memory for each in copies._mapped]
    assert len(memory) == 2 and all(each.is_pinned() for each in memory)
    copies.close()
    assert not any(each.is_pinned() for each in memory)
