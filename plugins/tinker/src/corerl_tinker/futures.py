"""Answers that come later: a promise for each request, long polls that wait for it, and results kept until they are
fetched. In memory, within one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from corerl.errors import UserError
from corerl.messages import message_of
from corerl_tinker.requests import Category, Refused

JSON = "application/json"
KEPT_SECONDS = 600.0  # after a result was fetched: the response may not have arrived, and clients ask again
GATHER_SECONDS = 0.01  # for requests that are done soon after another one: each poll costs client and server a request
LEAST_BYTES = 1024  # what a promise counts for at least, of memory


@frozen(kw_only=True)
class Answer:
    """What a client is sent."""

    body: bytes
    media_type: str = JSON
    error: str = ""  # a sentence, if there is no result


def answered(fields: Mapping[str, Any]) -> Answer:
    return Answer(body=json.dumps(fields).encode())


def failure(sentence: str, category: Category) -> Answer:
    return Answer(body=json.dumps({"error": sentence, "category": category}).encode(), error=sentence)


def answer_of(work: asyncio.Future[Answer]) -> Answer:
    if work.cancelled():
        return failure("the request was given up", "server")
    match work.exception():
        case None:
            return work.result()
        case Refused() as refused:
            return failure(refused.message, refused.category)
        case error:
            return failure(message_of(error), "user" if isinstance(error, UserError) else "server")


class Promise:
    """The answer to one request, once it is there."""

    def __init__(self, name: str, *, owner: str, size: int) -> None:
        self.name, self.owner = name, owner
        self.size = max(size, LEAST_BYTES)  # of the request, then of the answer
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.work: asyncio.Future[Answer] | None = None  # of which the answer will come


class Completions:
    """The requests of one sampler that are done, in that order, of which its client is told in one poll for all."""

    def __init__(self) -> None:
        self._seen, self._names = 0, list[str]()  # how many the client has seen; those after them
        self._more = asyncio.Event()

    def add(self, name: str) -> None:
        self._names.append(name)
        self._more.set()

    async def after(self, seen: int, seconds: float) -> tuple[list[str], int]:
        """The names after the first `seen`, which are forgotten, and how many there are with these. Waits so long for
        the first one, and a moment more for others."""
        del self._names[: max(0, seen - self._seen)]
        self._seen = max(seen, self._seen)
        if not self._names and seconds > 0:
            self._more.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), seconds)
                await asyncio.sleep(GATHER_SECONDS)
        return list(self._names), self._seen + len(self._names)


class Futures:
    """All promises of a server, by the names of their requests."""

    def __init__(self, *, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._promises: dict[str, Promise] = {}
        self._fetched: dict[str, float] = {}  # name -> when, the earliest first
        self._most, self._clock = most_bytes, clock
        self.bytes = 0  # of requests that wait, and of answers that are kept

    def __len__(self) -> int:
        return len(self._promises)

    def get(self, name: str) -> Promise | None:
        return self._promises.get(name)

    def open(self, name: str, *, owner: str, size: int = 0, urgent: bool = False) -> Promise:
        """Promise an answer. Raises Refused, with the status for which clients wait and repeat the request, if there is
        no memory for what it holds; one that others wait for is `urgent` and never refused."""
        if not urgent and self.bytes + size > self._most:
            self.forget(seconds=0.0)
            if self.bytes + size > self._most:
                raise Refused(
                    f"{len(self)} requests and results hold {self.bytes >> 20} MiB of serve.memory_mib; fetch results, "
                    "or send less at once",
                    status=429,
                )
        promise = self._promises[name] = Promise(name, owner=owner, size=size)
        self.bytes += promise.size
        return promise

    def fill(self, promise: Promise, work: asyncio.Future[Answer]) -> None:
        """Settle the promise with what `work` returns or raises; it is cancelled if the promise is given up before."""
        promise.work = work
        work.add_done_callback(lambda work: self.settle(promise, answer_of(work)))

    def settle(self, promise: Promise, answer: Answer) -> None:
        """The first answer counts."""
        if not promise.answer.done():
            size = max(len(answer.body), LEAST_BYTES)
            self.bytes += size - promise.size
            promise.size = size
            promise.answer.set_result(answer)
            if promise.work is not None:
                promise.work.cancel()

    async def wait(self, promise: Promise, seconds: float) -> Answer | None:
        """The answer, or None if it is not there after `seconds`."""
        if not (await asyncio.wait([promise.answer], timeout=seconds))[0]:
            return None
        if promise.name in self._promises:
            self._fetched.setdefault(promise.name, self._clock())
        return promise.answer.result()

    def forget(self, *, seconds: float = KEPT_SECONDS) -> None:
        """Forget what was fetched at least so long ago."""
        latest = self._clock() - seconds
        for name, _ in list(itertools.takewhile(lambda fetched: fetched[1] <= latest, self._fetched.items())):
            self._drop(name)

    def fetched(self, name: str) -> None:
        """The client says that it has the answer."""
        if name in self._fetched:
            self._drop(name)

    def give_up(self, owner: str, answer: Answer) -> None:
        """Forget what a session was promised; whoever still waits gets `answer`."""
        for name in [name for name, promise in self._promises.items() if promise.owner == owner]:
            self.settle(self._promises[name], answer)
            self._drop(name)

    def fail_all(self, answer: Answer) -> None:
        """Settle all that is open."""
        for promise in self._promises.values():
            self.settle(promise, answer)

    def _drop(self, name: str) -> None:
        self.bytes -= self._promises.pop(name).size
        self._fetched.pop(name, None)
