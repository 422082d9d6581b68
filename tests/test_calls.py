from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from corerl.calls import Calls, Future, wait_all
from corerl.errors import SaveFailed, WorkerDied

WITHIN = 60.0  # seconds for what takes none


class Looks:
    """A call that is ready after it was looked at `looks` times; never, where that is negative."""

    def __init__(self, looks: int = 0, answer: Any = None) -> None:
        self.looks, self.answer = looks, answer

    def ready(self, timeout: float) -> bool:
        self.looks -= 1
        return self.looks == -1

    def fetch(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def future(self, group: object = None) -> Future[Any]:
        return Future(group or self, self.ready, self.fetch)


class Ranks:
    """Runs calls in order, each once it is told `go`; a call that is an error other than SaveFailed ends them."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.log = [] if log is None else log
        self.ended = False
        self.calls = Calls(self)
        self._told: dict[Any, threading.Event] = {}

    def start(self, answer: Any) -> Future[str]:
        self._told[answer] = threading.Event()
        return self.calls.add(answer, lambda results: "".join(results))

    def go(self, *answers: Any) -> None:
        for answer in answers:
            self._told[answer].set()

    def ready(self, pending: Any, timeout: float) -> bool:
        return self._told[pending].wait(timeout)

    def wait(self, pending: Any) -> list[str]:
        assert self._told[pending].wait(WITHIN), "waited for in vain"
        self.log.append(str(pending))
        if isinstance(pending, Exception):
            self.ended = self.ended or not isinstance(pending, SaveFailed)
            raise pending
        return [pending, pending.upper()]


def answering(*answers: Any) -> tuple[Ranks, list[Future[str]]]:
    """Ranks that have all calls' answers, of which none was fetched."""
    ranks = Ranks()
    futures = [ranks.start(answer) for answer in answers]
    ranks.go(*answers)
    return ranks, futures


# ---- one future ------------------------------------------------------------------------------------------------------


def test_a_future_is_fetched_once_and_read_often() -> None:
    ranks = Ranks()
    future = ranks.start("a")
    assert not future.done() and not future.ready(0.001)
    with pytest.raises(TimeoutError, match=r"^the call has not ended within 0.001 s; it goes on: ask again, or wait"):
        future.result(timeout=0.001)
    ranks.go("a")
    assert future.done() and ranks.log == []
    assert [future.result(timeout=WITHIN), future.result(), future.result(0.0)] == ["aA"] * 3
    assert future.done() and ranks.log == ["a"]


def test_an_error_is_the_same_each_time() -> None:
    died = WorkerDied("its process died")
    _, (future,) = answering(died)

    async def awaited() -> None:
        await future

    for ask in (future.result, lambda: asyncio.run(awaited()), future.result):
        with pytest.raises(WorkerDied) as caught:
            ask()
        assert caught.value is died


def test_an_interrupted_wait_can_be_repeated() -> None:
    answers: list[Any] = [KeyboardInterrupt(), "a"]

    def fetch() -> str:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return str(answer)

    future = Future(None, lambda timeout: True, fetch)
    with pytest.raises(KeyboardInterrupt):
        future.result()
    assert [future.result(), future.result()] == ["a", "a"]


# ---- in an event loop ------------------------------------------------------------------------------------------------


def test_a_loop_awaits_several_groups_at_once() -> None:
    log: list[str] = []
    first, second = Ranks(log), Ranks(log)

    async def step(ranks: Ranks, answer: str) -> str:
        future = ranks.start(answer)
        log.append(f"started {answer}")
        result = await asyncio.wait_for(future, WITHIN)
        log.append(f"got {result}")
        return result

    async def other() -> None:  # the second group is done first, which nobody could tell were the loop blocked
        while log[-1] != "started b":
            await asyncio.sleep(0)
        second.go("b")
        while "got bB" not in log:
            await asyncio.sleep(0)
        first.go("a")

    async def both() -> list[Any]:
        return await asyncio.gather(step(first, "a"), step(second, "b"), other())

    assert asyncio.run(both()) == ["aA", "bB", None]
    assert log == ["started a", "started b", "b", "got bB", "a", "got aA"]


def test_more_awaits_than_executor_threads_run_together() -> None:
    ranks = [Ranks() for _ in range(40)]

    async def all_of_them() -> list[str]:
        awaits = [asyncio.ensure_future(each.start("a")) for each in ranks]
        for each in reversed(ranks):
            await asyncio.sleep(0)
            each.go("a")
        return await asyncio.gather(*awaits)

    assert asyncio.run(all_of_them()) == ["aA"] * 40


def test_a_cancelled_await_leaves_the_call_running() -> None:
    ranks = Ranks()
    failed = SaveFailed("disk full")
    futures = [ranks.start("a"), ranks.start(failed)]

    async def give_up() -> None:
        for future in futures:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(future, 0.001)

    asyncio.run(give_up())  # the loop is closed before the call ends
    assert not any(future.done() for future in futures)
    later = ranks.start("b")
    ranks.go("a", failed, "b")
    assert (later.result(), futures[0].result()) == ("bB", "aA")
    with pytest.raises(SaveFailed, match="^disk full$"):
        ranks.calls.raise_unread()


# ---- one group -------------------------------------------------------------------------------------------------------


def test_an_unread_error_is_raised_once_at_the_end() -> None:
    failed = SaveFailed("disk full")
    ranks, futures = answering(failed, "b", SaveFailed("still full"))
    assert futures[1].result() == "bB"  # the failed save changed nothing
    ranks.calls.wait()
    with pytest.raises(SaveFailed, match="^disk full$"):
        ranks.calls.raise_unread()
    with pytest.raises(SaveFailed, match="^still full$"):
        futures[2].result()
    ranks.calls.raise_unread()


# ---- several groups --------------------------------------------------------------------------------------------------


def died() -> WorkerDied:
    return WorkerDied("its process died")


def named(**looks: int) -> dict[str, Future[str]]:
    return {name: Looks(after, name.upper()).future() for name, after in looks.items()}


def test_results_come_in_the_order_of_calls() -> None:
    assert list(wait_all(named(a=3, b=0)).items()) == [("a", "A"), ("b", "B")]


def test_the_first_error_is_raised_while_others_hang() -> None:
    with pytest.raises(WorkerDied, match="^its process died$"):
        wait_all({**named(hangs=-5), "dies": Looks(1, died()).future()})
