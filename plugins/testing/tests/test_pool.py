from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from corerl.errors import Unsupported
from corerl_testing.pool import OneRank, RankFailed, RankPool

pytestmark = pytest.mark.processes


def summed(value: float) -> tuple[int, int, float]:
    """Where it runs, and the sum over ranks of value + rank."""
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), os.getpid(), total.item()


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such thing")
    dist.barrier()  # waits for a rank that never comes


def refuse_on_all() -> None:
    raise Unsupported("experts")


def refuse_on_one() -> None:
    if dist.get_rank() == 1:
        raise Unsupported("experts")


def exit_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def answer_late(value: float) -> float:
    time.sleep(1.0)
    return value


def gone(pid: int, within: float = 20.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_ranks_live_on_between_runs_and_answer_in_rank_order(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(summed, 1.0), rank_pool.run(summed, 2.0)
    assert [(rank, total) for rank, _, total in first] == [(0, 3.0), (1, 3.0)]
    assert [(rank, total) for rank, _, total in second] == [(0, 5.0), (1, 5.0)]
    assert [pid for _, pid, _ in first] == [pid for _, pid, _ in second]
    assert os.getpid() not in {pid for _, pid, _ in first}


def test_a_failed_rank_ends_the_pool_until_the_next_run() -> None:
    pool = RankPool(2)
    try:
        for function, reason in [
            (raise_on_one, r"^raise_on_one: rank 1 raised ValueError: no such thing\nTraceback (.*\n)*ValueError: "),
            (exit_on_one, "exit_on_one: rank 1 died with exit code 3, without an exception"),
            (die_on_one, "die_on_one: rank 1 died of SIGKILL, without an exception: "),
        ]:
            pids = [pid for _, pid, _ in pool.run(summed, 0.0)]
            with pytest.raises(RankFailed, match=reason):
                pool.run(function)
            assert all(gone(pid) for pid in pids)
        assert [total for _, _, total in pool.run(summed, 0.0)] == [1.0, 1.0]
    finally:
        pool.close()


def test_a_call_after_an_interrupted_one_gets_its_own_answers() -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise TimeoutError("the test's time is over")

    pool = RankPool(2)
    handler = signal.signal(signal.SIGUSR1, interrupt)
    try:
        pids = [pid for _, pid, _ in pool.run(summed, 0.0)]
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(TimeoutError):
            pool.run(answer_late, 5.0)
        assert all(gone(pid) for pid in pids)
        assert [total for _, _, total in pool.run(summed, 0.0)] == [1.0, 1.0]
    finally:
        signal.signal(signal.SIGUSR1, handler)
        pool.close()


def test_ranks_survive_a_refusal_by_all_of_them() -> None:
    pool = RankPool(2)
    try:
        pids = [pid for _, pid, _ in pool.run(summed, 0.0)]
        with pytest.raises(RankFailed, match=r"Unsupported: experts"):
            pool.run(refuse_on_all)
        assert [(pid, total) for _, pid, total in pool.run(summed, 1.0)] == [(pid, 3.0) for pid in pids]
        with pytest.raises(RankFailed, match=r"Unsupported: experts"):
            pool.run(refuse_on_one)
        assert all(gone(pid) for pid in pids)
    finally:
        pool.close()


def test_one_rank_is_this_process_and_leaves_no_group_behind() -> None:
    assert OneRank().run(summed, 4.0) == [(0, os.getpid(), 4.0)]
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError):
        OneRank().run(divmod, 1, 0)
    assert not dist.is_initialized()
