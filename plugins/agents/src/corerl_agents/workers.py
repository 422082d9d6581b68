"""Episode functions in worker processes, so that what they compute does not hold up the driver.

A worker imports the function once, and plays any number of episodes side by side, each as the driver would: plain
functions in threads, async ones in one event loop. Requests go to the episode's URL. A worker that ends costs the
episodes that it was playing, and is replaced. One that does not end an episode after its time is replaced too, and
killed once its other episodes have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import pickle
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from attrs import field, frozen

from corerl.data import Prompt
from corerl.errors import ConfigError, WorkerDied
from corerl.rollout import EventLoop, ServingProcess, described, exit_status
from corerl_agents.episodes import Episode, EpisodeFunction, Played, resolve_function
from corerl_agents.http_client import HttpClient

GRACE = 10.0  # seconds that an episode may go on in its worker after the run has given it up
EXIT = 1.0  # seconds for a process whose connection has closed to exit
RESTARTS = 4  # times the number of workers: how often workers may end in a row, without an episode that ends


@frozen(kw_only=True)
class Died:
    """The worker process of an episode has ended."""

    status: str
    episodes: int  # that it was playing


class Worker(ServingProcess):
    """A process that plays episodes, and two threads of the driver that talk with it: it may be too busy to listen."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        on_ended: Callable[[Worker, int, Any], None],
        on_gone: Callable[[Worker], None],
    ) -> None:
        """`on_ended` is called with the number of an episode and its outcome; `on_gone` when the process has ended."""
        self.started: Future[None] = Future()  # once the function is imported
        self.started.set_running_or_notify_cancel()  # whoever waits for it cancels nothing
        self.playing: dict[int, Future[Any]] = {}  # until they have ended there
        self.given_up: set[int] = set()  # of these, those that nobody waits for
        self.retired = False  # gets no more episodes
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        super().__init__(_serve, name, options)
        self._writing = threading.Thread(target=self._write, name="to a worker of episodes", daemon=True)
        self._writing.start()
        self.reading = threading.Thread(
            target=self._read, args=(on_ended, on_gone), name="from a worker of episodes", daemon=True
        )
        self.reading.start()

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an episode that it plays."""
        return self.playing.keys() <= self.given_up

    def send(self, *message: Any) -> None:
        self._messages.put(pickle.dumps(message))

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # it has ended, which the other thread notices
            while (message := self._messages.get()) is not None:
                self.connection.send_bytes(message)

    def _read(self, on_ended: Callable[[Worker, int, Any], None], on_gone: Callable[[Worker], None]) -> None:
        with contextlib.suppress(EOFError, OSError):
            if (error := self.connection.recv()) is not None:
                self.started.set_exception(error)
            else:
                self.started.set_result(None)
            while True:
                on_ended(self, *self.connection.recv())
        self.process.join(EXIT)  # to learn its exit status
        on_gone(self)
        self.kill()
        self.process.join()
        self._messages.put(None)
        self._writing.join()
        self.connection.close()


class Workers:
    """The workers of a run. Any thread may use them."""

    def __init__(self, function: EpisodeFunction, count: int) -> None:
        """Starts them, and does not wait for that."""
        self._function = function
        self._count = count
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._deaths = 0  # in a row
        self._failed: Exception | None = None  # why there are no more
        self._all: list[Worker] = []  # whose processes may run
        for _ in range(count):
            self._start()
        self._first = [worker.started for worker in self._all]

    def close(self) -> None:
        """Kill them, and wait for that."""
        with self._lock:
            self._failed = self._failed or WorkerDied("the workers of episodes were stopped, as the run has ended")
            ending = list(self._all)
        for worker in ending:
            worker.kill()
        for worker in ending:
            worker.reading.join()

    async def started(self) -> None:
        """Wait until all have imported the function for the first time. Raises ConfigError if one cannot, and
        WorkerDied."""
        await asyncio.gather(*map(asyncio.wrap_future, self._first))

    async def play(self, episode: Episode, name: str) -> Played | Died:
        """Play an episode in the worker that plays fewest. If this is cancelled, so is a coroutine there. Raises
        WorkerDied if there are no more workers."""
        with self._lock:
            if self._failed is not None:
                raise self._failed
            number = next(self._numbers)
            able = [worker for worker in self._all if not worker.retired]
            worker = min(able, key=lambda each: len(each.playing))
            worker.send(number, episode.prompt, episode.base_url, dict(episode.roles), name)
            ended = worker.playing[number] = Future[Any]()
            ended.set_running_or_notify_cancel()  # it goes on there, whatever becomes of who waits
        try:
            return await asyncio.wrap_future(ended)
        except asyncio.CancelledError:
            self._give_up(worker, number)
            raise

    def _give_up(self, worker: Worker, number: int) -> None:
        with self._lock:
            if number not in worker.playing:
                return
            worker.given_up.add(number)
            worker.send(number)
            self._kill_if_retired(worker)
        asyncio.get_running_loop().call_later(GRACE, self._retire, worker, number)

    def _retire(self, worker: Worker, number: int) -> None:
        """Replace a worker in which an episode goes on that was given up."""
        with self._lock:
            if number in worker.playing and not worker.retired and self._failed is None:
                worker.retired = True
                self._start()
                self._kill_if_retired(worker)

    def _kill_if_retired(self, worker: Worker) -> None:
        if worker.retired and worker.idle:
            worker.kill()

    def _start(self) -> None:
        function = self._function
        self._all.append(Worker(function.name, function.options, on_ended=self._on_ended, on_gone=self._on_gone))

    def _on_ended(self, worker: Worker, number: int, outcome: Any) -> None:
        with self._lock:
            self._deaths = 0
            worker.given_up.discard(number)
            worker.playing.pop(number).set_result(outcome)
            self._kill_if_retired(worker)

    def _on_gone(self, worker: Worker) -> None:
        exitcode = worker.process.exitcode
        status = "its connection closed" if exitcode is None else exit_status(exitcode)
        with self._lock:
            self._all.remove(worker)
            replaced = self._failed is None and not worker.retired  # one that was retired has been
            if replaced:
                self._deaths += 1
                self._failed = self._why_no_more(worker, status)
            if not worker.started.done():
                worker.started.set_exception(self._failed or WorkerDied(f"a worker of episodes has ended ({status})"))
            died = Died(status=status, episodes=len(worker.playing))
            for ended in worker.playing.values():
                if self._failed is None:
                    ended.set_result(died)
                else:
                    ended.set_exception(self._failed)
            worker.playing.clear()
            if replaced and self._failed is None:
                self._start()

    def _why_no_more(self, worker: Worker, status: str) -> Exception | None:
        """Why a worker that has ended is not replaced; None if it is."""
        name = f"samplers.episodes.function {self._function.name!r}"
        if not worker.started.done():
            return WorkerDied(
                f"a worker process for {name} ended ({status}) before importing it: the module ends the process, or "
                "the script that started the run lacks `if __name__ == '__main__':`; fix that, or set "
                "samplers.episodes.workers=0"
            )
        if worker.started.exception() is not None:
            return worker.started.exception()  # type: ignore[return-value]
        if self._deaths > RESTARTS * self._count:
            return WorkerDied(
                f"worker processes for {name} have ended {self._deaths} times, and no episode has ended in between; "
                f"the last one by {status}; see whether the machine has memory for {self._count} of them"
            )
        return None


@frozen(kw_only=True, eq=False)
class PlayedByWorkers(EpisodeFunction):
    """A user's function, which worker processes call."""

    workers: Workers = field(repr=False)

    @classmethod
    def start(cls, function: EpisodeFunction, count: int) -> PlayedByWorkers:
        return cls(
            name=function.name,
            function=function.function,
            options=function.options,
            workers=Workers(function, count),
        )

    async def started(self) -> None:
        await self.workers.started()

    async def play(self, episode: Episode, *, name: str = "episode function") -> Played:
        outcome = await self.workers.play(episode, name)
        if isinstance(outcome, Died):
            others = f", as was the function of {outcome.episodes - 1} others there" * (outcome.episodes > 1)
            what = f"was running in a worker process that ended ({outcome.status}){others},"
            return self.failure("died", what, episode.prompt)
        return outcome

    def close(self) -> None:
        self.workers.close()


# ---- in the process --------------------------------------------------------------------------------------------------


def _serve(connection: Connection, name: str, options: Mapping[str, Any]) -> None:
    try:
        function = resolve_function(name, options)
    except ConfigError as error:
        connection.send(error)
        return
    connection.send(None)
    is_async = inspect.iscoroutinefunction(function.function)
    client, loop, sending = HttpClient(), EventLoop("episodes"), threading.Lock()
    playing: dict[int, Future[Any]] = {}

    def ended(number: int, prompt: Prompt, played: Future[Any]) -> None:
        outcome: Any = None  # of one that was given up
        if not played.cancelled():
            error = played.exception()
            outcome = function.failure("raised", f"raised {described(error)}", prompt) if error else played.result()
        with sending:
            playing.pop(number, None)
            connection.send((number, outcome))

    while True:
        number, *asked = connection.recv()
        if asked:
            prompt, base_url, roles, task = asked
            episode = Episode(prompt=prompt, base_url=base_url, roles=roles, server=client)
            with sending:
                played = playing[number] = loop.begin(function.play(episode, name=task))
            played.add_done_callback(functools.partial(ended, number, prompt))
        elif is_async and (given_up := playing.get(number)) is not None:
            given_up.cancel()  # a plain function cannot be cancelled: its end is waited for
