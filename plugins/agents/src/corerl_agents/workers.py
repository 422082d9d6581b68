"""Episodes in worker processes, so that what their functions compute does not hold up the driver.

A worker imports the function once, and plays any number of episodes side by side, each as the driver would: plain
functions in threads, async ones in one event loop, commands in processes. Requests go to the episode's URL. A worker
that ends costs the episodes that it was playing, and is replaced. One that does not end an episode after its time is
replaced too, and killed once its other episodes have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Protocol

from attrs import field, frozen

from corerl.data import Prompt
from corerl.errors import ConfigError, WorkerDied
from corerl.rollout import EventLoop, Failure, ServingProcess, described, exit_status
from corerl_agents.commands import EpisodeCommand, allow_open_files, command_of
from corerl_agents.config import EpisodesConfig
from corerl_agents.episodes import Episode, EpisodeFunction, Played, resolve_function
from corerl_agents.http_client import HttpClient

GRACE = 10.0  # seconds that an episode may go on in its worker after the run has given it up
EXIT = 1.0  # seconds for a process to exit whose connection has closed, or that is killed on another node
RESTARTS = 4  # times the number of workers: how often workers may end in a row, without an episode that ends


@frozen(kw_only=True)
class Died:
    """The worker process of an episode has ended."""

    status: str
    episodes: int  # that it was playing
    began: bool = True  # whether it had started, and so may have begun them


class Gone(Exception):
    """A worker's process has ended: `status` says how. It is `lost` if that was no doing of its own."""

    def __init__(self, status: str, *, lost: bool = False) -> None:
        super().__init__(status)
        self.status, self.lost = status, lost


class WorkerProcess(Protocol):
    """The process of a worker, which begins as it is made."""

    def send(self, message: bytes) -> None:
        """Does nothing if it has ended."""

    def receive(self) -> bytes:
        """Its next message. Raises Gone if it has ended."""

    def kill(self) -> None:
        """Kill it, and what it has started; waits for nothing. Idempotent."""

    def end(self) -> None:
        """Kill it, and wait for that."""


class LocalProcess(ServingProcess):
    """A worker's process on this machine."""

    def __init__(self, options: EpisodesConfig, directory: str = "") -> None:
        """`directory`: to play in, if it is not that of this process."""
        super().__init__(_serve, options, directory)

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended, as `receive` says
            self.connection.send_bytes(message)

    def receive(self) -> bytes:
        try:
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            code = self.wait(EXIT)
            raise Gone("its connection closed" if code is None else exit_status(code)) from None


class Worker:
    """A process that plays episodes, and two threads of the driver that talk with it: it may be too busy to listen."""

    def __init__(
        self,
        process: WorkerProcess,
        started: Future[None],
        *,
        on_ended: Callable[[Worker, int, Any], None],
        on_gone: Callable[[Worker, Gone], None],
    ) -> None:
        """`started` gets its result once the function is imported. `on_ended` is called with the number of an episode
        and its outcome; `on_gone` when the process has ended."""
        self.process = process
        self.started = started
        self.playing: dict[int, Future[Any]] = {}  # until they have ended there
        self.given_up: set[int] = set()  # of these, those that nobody waits for
        self.retired = False  # gets no more episodes
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
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
        while (message := self._messages.get()) is not None:
            self.process.send(message)

    def _read(self, on_ended: Callable[[Worker, int, Any], None], on_gone: Callable[[Worker, Gone], None]) -> None:
        try:
            if (error := pickle.loads(self.process.receive())) is not None:
                self.started.set_exception(error)
            else:
                self.started.set_result(None)
            while True:
                on_ended(self, *pickle.loads(self.process.receive()))
        except Gone as gone:
            on_gone(self, gone)
        self.process.kill()
        self._messages.put(None)
        self._writing.join()
        self.process.end()


class Workers:
    """The workers of a run. Any thread may use them."""

    def __init__(self, player: EpisodeFunction, count: int, launch: Callable[[], WorkerProcess]) -> None:
        """Starts them, each in a process that `launch` begins, and does not wait for that."""
        self._player = player
        self._count = count
        self._launch = launch
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._deaths = 0  # in a row
        self._failed: Exception | None = None  # why there are no more
        self._all: list[Worker] = []  # whose processes may run
        with self._lock:  # one may have ended before it is listed
            for _ in range(count):
                self._start()
        self._first = [worker.started for worker in self._all]

    def close(self) -> None:
        """Kill them, and wait for that."""
        with self._lock:
            self._failed = self._failed or WorkerDied("the workers of episodes were stopped, as the run has ended")
            ending = list(self._all)
        for worker in ending:
            worker.process.kill()
        for worker in ending:
            worker.reading.join()

    async def started(self) -> None:
        """Wait until all have imported the function for the first time. Raises ConfigError if one cannot, and
        WorkerDied."""
        await asyncio.gather(*map(asyncio.wrap_future, self._first))

    async def play(self, episode: Episode, name: str) -> Played | Died:
        """Play an episode in the worker that plays fewest. If this is cancelled, so is a coroutine there. Raises
        WorkerDied if there are no more workers."""
        while True:
            outcome = await self._play(episode, name)
            if not isinstance(outcome, Died) or outcome.began:
                return outcome

    async def _play(self, episode: Episode, name: str) -> Played | Died:
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
                self._kill_if_retired(worker)
                self._failed = self._replace()

    def _kill_if_retired(self, worker: Worker) -> None:
        if worker.retired and worker.idle:
            worker.process.kill()

    def _start(self, started: Future[None] | None = None) -> None:
        if started is None:
            started = Future()
            started.set_running_or_notify_cancel()  # whoever waits for it cancels nothing
        self._all.append(Worker(self._launch(), started, on_ended=self._on_ended, on_gone=self._on_gone))

    def _on_ended(self, worker: Worker, number: int, outcome: Any) -> None:
        with self._lock:
            self._deaths = 0
            worker.given_up.discard(number)
            worker.playing.pop(number).set_result(outcome)
            self._kill_if_retired(worker)

    def _on_gone(self, worker: Worker, gone: Gone) -> None:
        with self._lock:
            began = worker.started.done()
            self._all.remove(worker)
            if self._failed is None and not worker.retired:  # one that was retired has been replaced
                self._deaths += 1
                # Whoever waits for one that has not started waits for the next one.
                self._failed = self._why_no_more(worker, gone) or self._replace(None if began else worker.started)
            if self._failed is not None and not began:
                worker.started.set_exception(self._failed)
            died = Died(status=gone.status, episodes=len(worker.playing), began=began)
            for ended in worker.playing.values():
                if self._failed is None:
                    ended.set_result(died)
                else:
                    ended.set_exception(self._failed)
            worker.playing.clear()

    def _replace(self, started: Future[None] | None = None) -> Exception | None:
        """Start another worker, which completes `started`. Returns what keeps it from that."""
        try:
            self._start(started)
        except Exception as error:
            return error
        return None

    def _why_no_more(self, worker: Worker, gone: Gone) -> Exception | None:
        """Why a worker that has ended is not to be replaced."""
        name = f"{self._player.setting} {self._player.name!r}"
        if not worker.started.done() and not gone.lost:
            return WorkerDied(
                f"a worker process for {name} ended ({gone.status}) before importing it: the module ends the process, "
                "or the script that started the run lacks `if __name__ == '__main__':`; fix that, or set "
                "samplers.episodes.workers=0"
            )
        if worker.started.done() and worker.started.exception() is not None:
            return worker.started.exception()  # type: ignore[return-value]
        if self._deaths > RESTARTS * self._count:
            return WorkerDied(
                f"worker processes for {name} have ended {self._deaths} times, and no episode has ended in between; "
                f"the last one by {gone.status}; see whether the machine has memory for {self._count} of them"
            )
        return None


@frozen(kw_only=True, eq=False)
class PlayedByWorkers(EpisodeFunction):
    """A user's function or command, which worker processes call."""

    player: EpisodeFunction
    workers: Workers = field(repr=False)

    @classmethod
    def start(cls, options: EpisodesConfig, launch: Callable[[], WorkerProcess] | None = None) -> PlayedByWorkers:
        """`launch` begins a worker's process; by default on this machine. Raises ConfigError."""
        player = player_of(options)
        return cls(
            name=player.name,
            function=player.function,
            options=player.options,
            player=player,
            workers=Workers(player, options.workers, launch or functools.partial(LocalProcess, options)),
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

    def failure(self, kind: str, what: str, prompt: Prompt) -> Failure:
        return self.player.failure(kind, what, prompt)

    def close(self) -> None:
        self.workers.close()


def player_of(options: EpisodesConfig) -> EpisodeFunction:
    """What plays an episode in the process that asks. Raises ConfigError."""
    if options.command:
        return command_of(options.command, options.roles)
    return resolve_function(options.function, options.options)


# ---- in the process --------------------------------------------------------------------------------------------------


def _serve(connection: Connection, options: EpisodesConfig, directory: str) -> None:
    try:
        if directory:
            _enter(directory)
        player = player_of(options)
    except ConfigError as error:
        there = f" (on {socket.gethostname()})" if directory else ""
        connection.send(ConfigError(f"{error.message}{there}"))
        return
    connection.send(None)
    allow_open_files()
    cancels = isinstance(player, EpisodeCommand) or inspect.iscoroutinefunction(player.function)
    client, loop, sending = HttpClient(), EventLoop("episodes"), threading.Lock()
    playing: dict[int, Future[Any]] = {}

    def ended(number: int, prompt: Prompt, played: Future[Any]) -> None:
        outcome: Any = None  # of one that was given up
        if not played.cancelled():
            error = played.exception()
            outcome = player.failure("raised", f"raised {described(error)}", prompt) if error else played.result()
        with sending:
            playing.pop(number, None)
            connection.send((number, outcome))

    while True:
        number, *asked = connection.recv()
        if asked:
            prompt, base_url, roles, task = asked
            episode = Episode(prompt=prompt, base_url=base_url, roles=roles, server=client)
            with sending:
                played = playing[number] = loop.begin(player.play(episode, name=task))
            played.add_done_callback(functools.partial(ended, number, prompt))
        elif cancels and (given_up := playing.get(number)) is not None:
            given_up.cancel()  # a plain function cannot be cancelled: its end is waited for


def _enter(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise ConfigError(
            f"samplers.episodes.workers_on: cannot enter the directory of the run's command, {directory!r} "
            f"({error.strerror}); it must be at the same path on all nodes"
        ) from error
