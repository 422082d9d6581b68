"""Sleep on a GPU: pinned memory, where copies are waited for, and what the driver counts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from corerl.memory.device import empty_cache, held_on, lone_rank_options
from corerl.memory.pool import PinnedPool
from corerl.memory.storage import PACK, SMALL, StorageSleeper, resident_bytes
from corerl.types import MemoryKind
from corerl.weights.pinning import CudaPinning

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = (2**28 + 4, *[SMALL // 8] * 300, SMALL, 2**26, *range(1, 400), PACK)  # bytes


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def sleeper(device: torch.device) -> Iterator[StorageSleeper]:
    made = StorageSleeper(device)
    yield made
    made.close()


def state(device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    # Drawn as they are: larger ones, converted, would leave memory behind that some of these then lie in.
    return [torch.randint(256, (size,), generator=generator, device=device, dtype=torch.uint8) for size in SIZES]


def test_memory_is_pinned_by_threads_and_unpinned_in_the_end(device: torch.device) -> None:
    pool = PinnedPool(CudaPinning(device))
    pool.reserve(2**28)
    pieces = pool.take(2**27)
    assert pool.refusal == ""
    assert all(piece.memory.is_pinned() for piece in pieces)
    pool.close()
    assert not any(piece.memory.is_pinned() for piece in pieces)


def test_state_comes_back_bit_for_bit_after_unfinished_kernels(device: torch.device, sleeper: StorageSleeper) -> None:
    expected, held = state(device), state(device)
    sleeper.reserve(sum(SIZES))
    side = torch.cuda.Stream(device)
    for _ in range(3):
        with torch.cuda.stream(side):  # what a sleep must wait for, on whatever stream
            torch.cuda._sleep(50_000_000)
            for tensor, wanted in zip(held, expected, strict=True):
                tensor.copy_(wanted)
        assert sleeper.release(MemoryKind.OPTIMIZER, held) == sum(SIZES)
        assert (resident_bytes(held), sleeper.host.refusal) == (0, "")
        torch.full((2**28,), 7, dtype=torch.uint8, device=device)  # someone else writes to that memory
        assert sleeper.restore(MemoryKind.OPTIMIZER) == sum(SIZES)
        assert all(torch.equal(a, b) for a, b in zip(held, expected, strict=True))


def test_the_driver_counts_what_was_freed_and_again_what_was_restored(
    device: torch.device, sleeper: StorageSleeper
) -> None:
    gc.collect()
    torch.cuda.empty_cache()  # these would lie in larger pieces that earlier tests have left, and free all of them
    held = state(device)
    torch.cuda.empty_cache()
    awake = held_on(device, held)
    sleeper.release(MemoryKind.PARAM, held)
    torch.cuda.empty_cache()
    asleep = held_on(device, held)
    assert awake.residual - asleep.residual == pytest.approx(sum(SIZES), rel=0.1)
    assert asleep.live + asleep.cached <= asleep.residual <= asleep.used
    sleeper.restore(MemoryKind.PARAM)
    assert held_on(device, held).residual == pytest.approx(awake.residual, rel=0.1)


def test_device_memory_that_is_not_there_leaves_all_asleep(device: torch.device, sleeper: StorageSleeper) -> None:
    expected, held = state(device), state(device)
    sleeper.release(MemoryKind.PARAM, held)
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(2**27 / total, device)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            sleeper.restore(MemoryKind.PARAM)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert resident_bytes(held) == 0
    sleeper.restore(MemoryKind.PARAM)
    assert all(torch.equal(a, b) for a, b in zip(held, expected, strict=True))


def test_a_lone_ranks_communicator_holds_little_and_does_what_others_do(device: torch.device) -> None:
    timeout = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, timeout=timeout, pg_options=lone_rank_options(timeout)
    )
    try:
        summed, found = torch.arange(2**20, device=device), torch.empty(2**20, dtype=torch.long, device=device)
        dist.all_reduce(summed)  # the first also loads NCCL's kernels
        second = dist.new_group([0], timeout=timeout, pg_options=lone_rank_options(timeout))
        before = held_on(device, []).used
        dist.all_reduce(summed, group=second)
        dist.reduce_scatter_tensor(found, summed, group=second)
        assert torch.equal(found, torch.arange(2**20, device=device))
        assert held_on(device, []).used - before < 64 * 2**20
    finally:
        dist.destroy_process_group()


def test_an_empty_cache_keeps_no_segment_for_the_sake_of_cublas(device: torch.device) -> None:
    factor = torch.ones(1024, 1024, dtype=torch.bfloat16, device=device)
    empty_cache(device)
    before = torch.cuda.memory_reserved(device)
    torch.empty(2**30, dtype=torch.uint8, device=device)  # leaves room, of which cuBLAS takes its workspace
    assert float((factor @ factor).sum()) == 2.0**30
    assert torch.cuda.memory_reserved(device) - before >= 2**30
    empty_cache(device)
    assert torch.cuda.memory_reserved(device) - before < 2**25
