from __future__ import annotations

import errno
import mmap
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from corerl.memory import pool as pool_module
from corerl.memory.pool import PinnedPool
from corerl_testing.pool import RankPool

PAGE = 4096


class Driver:
    """Pins nothing, and remembers what it was asked for."""

    def __init__(self, reason: str = "") -> None:
        self.reason, self.allowed = reason, threading.Event()
        self.allowed.set()
        self.pinned: list[int] = []  # addresses
        self.bytes = 0
        self.threads: set[str] = set()
        self._lock = threading.Lock()

    def pin(self, memory: torch.Tensor) -> str:
        self.allowed.wait(30)
        with self._lock:
            self.threads.add(threading.current_thread().name)
            self.bytes += memory.numel()
            self.pinned += [] if self.reason else [memory.data_ptr()]
        return self.reason

    def unpin(self, memory: torch.Tensor) -> None:
        self.pinned.remove(memory.data_ptr())


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def pool(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[PinnedPool]:
    """Of segments of at most four pages."""
    monkeypatch.setattr(pool_module, "SEGMENT", 4 * PAGE)
    monkeypatch.setattr(pool_module, "SMALLEST_SEGMENT", 2 * PAGE)
    made = PinnedPool(driver, threads=2)
    yield made
    made.close()


def sizes(pieces: list[Any]) -> list[int]:
    return [piece.memory.numel() for piece in pieces]


def test_returned_memory_is_reused_without_pinning_again(pool: PinnedPool, driver: Driver) -> None:
    pool.reserve(8 * PAGE)
    first, second, third = (pool.take(2 * PAGE) for _ in range(3))
    pool.give_back(second)
    pool.give_back(first)  # in any order: neighbors are one again
    assert sizes(pool.take(4 * PAGE)) == [4 * PAGE]
    pool.give_back(third)
    assert sizes(pool.take(4 * PAGE)) == [4 * PAGE]
    assert driver.bytes == 8 * PAGE


def test_more_than_was_reserved_is_made_when_it_is_asked_for(pool: PinnedPool, driver: Driver) -> None:
    pool.reserve(2 * PAGE)
    assert sum(sizes(pool.take(3 * PAGE))) == 3 * PAGE
    pool.reserve(3 * PAGE)  # there already
    assert driver.bytes == pool.size == 3 * PAGE


def test_all_of_it_is_unpinned_in_the_end(driver: Driver) -> None:
    pool = PinnedPool(driver, threads=3)
    pool.reserve(2**20)
    pool.take(100)
    assert len(driver.pinned) == 1
    pool.reserve(2**27)  # nobody waits for these
    pool.close()
    assert driver.pinned == []
    pool.close()


def test_memory_that_cannot_be_pinned_is_used_unpinned() -> None:
    driver = Driver(reason="out of memory")
    pool = PinnedPool(driver, threads=1)
    assert pool.refusal == ""
    (piece,) = pool.take(1000)
    piece.memory.fill_(3)
    assert pool.refusal.startswith("host memory could not be pinned (out of memory; `ulimit -l` is ")
    assert pool.refusal.endswith("); sleep and wake_up will be slow")
    pool.close()  # what was never pinned is not unpinned


def test_a_host_without_memory_is_an_error(pool: PinnedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.reserve(4 * PAGE)
    pool.give_back(pool.take(PAGE))
    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        pool.take(5 * PAGE)
    assert pool.size == 4 * PAGE  # of what could not be made nothing is counted
    assert sum(sizes(pool.take(4 * PAGE))) == 4 * PAGE
    monkeypatch.undo()
    assert sum(sizes(pool.take(5 * PAGE))) == 5 * PAGE


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_more_than_the_host_has_is_refused_before_a_page_is_touched(pool: PinnedPool, driver: Driver) -> None:
    with pytest.raises(
        MemoryError, match=r"need 4194304.00 GiB more host memory, but the host has \d+\.\d+ GiB left; put"
    ):
        pool.reserve(2**52)
    with pytest.raises(MemoryError, match="4194304.00 GiB more"):
        pool.take(2**52)
    assert (pool.size, driver.bytes) == (0, 0)


def reserve_on_a_host_with(free: float, nbytes: int, hosts: int = 1) -> str:
    """On every rank of a pool, whose ranks are spread over so many hosts: what it is told."""
    host = PinnedPool(Driver(), threads=1)
    name = f"node-{dist.get_rank() % hosts}"
    with (
        mock.patch.object(pool_module, "available_bytes", return_value=free),
        mock.patch.object(socket, "gethostname", return_value=name),
    ):
        try:
            host.reserve(nbytes, dist.group.WORLD)
        except MemoryError as error:
            return str(error)
    host.close()
    return ""


def test_ranks_of_one_host_ask_together(rank_pool: RankPool) -> None:
    assert rank_pool.run(reserve_on_a_host_with, 2.5 * 2**28, 2**28) == ["", ""]
    told = rank_pool.run(reserve_on_a_host_with, 1.5 * 2**28, 2**28)
    assert told[0] == told[1]
    assert told[0].startswith(
        "what sleeps, and snapshots, need 0.50 GiB more host memory for 2 ranks, but the host has 0.38 GiB left"
    )
    assert rank_pool.run(reserve_on_a_host_with, 1.5 * 2**28, 2**28, 2) == ["", ""]


@pytest.mark.parametrize(
    ("most", "available"), [("max\n", 500.0), (f"{300 * 1024}\n", 160.0), (f"{100 * 1024}\n", 0.0), ("", 500.0)]
)
def test_a_container_may_allow_less_than_its_host_has(
    most: str, available: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KiB; of the 200 in use 60 are what files are cached in. Without a limit there are no such files at all."""
    (tmp_path / "meminfo").write_text("MemTotal:  900 kB\nMemAvailable:    500 kB\n")
    for name, text in {
        "max": most,
        "current": f"{200 * 1024}\n",
        "stat": f"anon 7\nfile 9\nactive_file {20 * 1024}\ninactive_file {40 * 1024}\n",
    }.items():
        if most:
            (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(pool_module, "CONTAINER", tmp_path)
    monkeypatch.setattr(pool_module, "MEMINFO", tmp_path / "meminfo")
    assert pool_module.available_bytes() == available * 1024
