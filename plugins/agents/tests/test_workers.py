"""Functions that real worker processes call."""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from corerl.errors import ConfigError, WorkerDied
from corerl.rollout import Failure
from corerl_agents import workers
from corerl_agents.commands import FILES
from corerl_agents.config import EpisodesConfig
from corerl_agents.episodes import Episode
from corerl_agents.workers import Gone, LocalProcess, PlayedByWorkers, Workers
from plugins.agents.tests import worker_functions
from plugins.agents.tests.oracle import PROMPTS, Fails, Play, assert_equal
from tests.machine import paced

pytestmark = pytest.mark.processes

HERE = "plugins.agents.tests.worker_functions"
Start = Callable[..., PlayedByWorkers]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[PlayedByWorkers] = []

    def started(
        name: str, count: int, options: Mapping[str, Any] | None = None, *, module: str = HERE, launch: Any = None
    ) -> Any:
        config = EpisodesConfig(function=f"{module}:{name}", options=options or {}, workers=count)
        made.append(PlayedByWorkers.start(config, launch))
        return made[-1]

    yield started
    for each in made:
        processes = [worker.process.process for worker in each.workers._all]
        each.close()
        assert not any(process.is_alive() for process in processes)


def wait_for(fits: Callable[[], bool]) -> None:
    deadline = time.monotonic() + paced(60)
    while not fits():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_workers_play_as_the_driver_does(play: Play, start: Start) -> None:
    here = play(worker_functions.two_turns)
    there = play(start("two_turns", 2))
    assert_equal(there, here)
    assert there.outcomes == here.outcomes and all(isinstance(each, float) for each in here.outcomes)


def test_a_worker_imports_what_its_function_needs_alone(play: Play, start: Start) -> None:
    assert play(start("heavy", 1), samples=1).outcomes == [0.0, 0.0]


def test_driver_and_workers_may_open_more_than_1024_files(play: Play, start: Start) -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        outcomes = play(start("open_files", 1), samples=1).outcomes
        wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
        assert outcomes == [resource.getrlimit(resource.RLIMIT_NOFILE)[0]] * 2 == [wanted] * 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("error", [ValueError("not allowed to raise maximum limit"), PermissionError(1, "no")])
def test_episodes_are_played_where_the_limit_cannot_be_raised(
    error: Exception, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(limit: int, wanted: tuple[int, int]) -> None:
        asked.append(wanted)
        raise error

    monkeypatch.setattr(resource, "getrlimit", lambda limit: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert play(lambda episode: episode.chat(episode.messages) and 1.0, samples=1).outcomes == [1.0, 1.0]
    assert asked == [(FILES, resource.RLIM_INFINITY)]


def test_a_refusal_is_that_of_the_driver(failure: Fails, start: Start) -> None:
    here, there = failure(worker_functions.refused), failure(start("refused", 1))
    assert there.kind == here.kind == "raised"
    assert there.message == here.message.replace("mine:play", f"{HERE}:refused")


def test_each_worker_killed_costs_one_episode(
    play: Play, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "EXIT", paced(20))  # of which nothing is to be seen here
    count, episodes = 3, 12
    function = start("waits_for_its_end", count, {"directory": str(tmp_path), "first": count})
    killed: list[int] = []

    def kill_one_by_one() -> None:
        for number in range(count):
            file = tmp_path / str(number)
            wait_for(lambda file=file: file.exists() and file.read_text().endswith("\n"))
            killed.append(int(file.read_text()))
            os.kill(killed[-1], signal.SIGKILL)

    killing = threading.Thread(target=kill_one_by_one)
    killing.start()
    outcomes = play(function, samples=episodes // 2, concurrency=count).outcomes
    killing.join()
    died = [each for each in outcomes if isinstance(each, Failure)]
    assert len(outcomes) == episodes and len(set(killed)) == count == len(died)
    assert {each.kind for each in died} == {"died"}
    assert all("was running in a worker process that ended (SIGKILL), on prompt" in each.message for each in died)
    assert outcomes.count(1.0) == episodes - count


def test_workers_that_always_end_end_the_run(play: Play, start: Start) -> None:
    with pytest.raises(WorkerDied, match="have ended 5 times, and no episode has ended in between; the last one"):
        play(start("ends_its_process", 1), concurrency=1)


def test_a_worker_that_cannot_import_ends_the_run(
    play: Play, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"import os\nif os.getpid() != {os.getpid()}:\n    os._exit(3)\ndef play(episode):\n    return 1.0\n"
    (tmp_path / "ends_elsewhere.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkerDied, match=r"'ends_elsewhere:play' ended \(exit status 3\) before importing it"):
        play(start("play", 2, module="ends_elsewhere"))


class Pretended:
    """A process that imports its function and ends when a test says so, and plays an episode at once by its number."""

    process = Mock(is_alive=lambda: False)

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.imported, self.asked = threading.Event(), threading.Event()
        self.gone: Gone | None = None
        self.ended = False
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._said.put(None)

    def send(self, message: bytes) -> None:
        number, *asked = pickle.loads(message)
        if asked:
            self._said.put((number, self.number))
            self.asked.set()

    def receive(self) -> bytes:
        self.imported.wait()
        said = self.gone or self._said.get()
        if isinstance(said, Gone):
            raise said
        return pickle.dumps(said)

    def ends(self, gone: Gone) -> None:
        self.gone = gone
        self._said.put(gone)
        self.imported.set()

    def kill(self) -> None:
        self.ended = True
        self.ends(Gone("SIGKILL"))

    end = kill


LOST = Gone("the node is gone", lost=True)
EPISODE = Episode(prompt=PROMPTS[0], base_url="", server=Mock())


def pretending(start: Start) -> tuple[Workers, list[Pretended]]:
    """One worker, and the processes that were begun for it."""
    begun: list[Pretended] = []

    def launch() -> Pretended:
        begun.append(Pretended(len(begun)))
        return begun[-1]

    return start("where", 1, launch=launch).workers, begun


def test_a_worker_lost_before_its_start_is_replaced(start: Start) -> None:
    """Its node is gone, say, as it is begun: whoever waits for it, and for the episode that it was given, gets both."""
    made, begun = pretending(start)

    async def lose() -> Any:
        waiting = asyncio.gather(made.started(), made.play(EPISODE, "one"))
        await asyncio.to_thread(begun[0].asked.wait, paced(20))
        begun[0].ends(LOST)
        await asyncio.to_thread(wait_for, lambda: len(begun) == 2 and begun[0].ended)
        begun[1].imported.set()
        return await asyncio.wait_for(waiting, paced(20))

    assert asyncio.run(lose()) == [None, 1]


def test_workers_replaced_while_they_import_play_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "GRACE", 0.0)
    made, begun = pretending(start)
    begun[0].ends(LOST)
    wait_for(lambda: len(begun) == 2)
    begun[1].imported.set()

    async def three_episodes() -> list[Any]:
        await made.started()
        begun[1].ends(Gone("SIGKILL"))
        await asyncio.to_thread(wait_for, lambda: len(begun) == 3)
        given_up, other = (asyncio.create_task(made.play(EPISODE, name)) for name in ("given up", "other"))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.to_thread(wait_for, lambda: len(begun) == 4)
        for each in begun[2:]:
            each.imported.set()
        return [await asyncio.wait_for(each, paced(20)) for each in (other, made.play(EPISODE, "next"))]

    assert asyncio.run(three_episodes()) == [2, 3]


def test_where_no_worker_can_be_begun_its_episode_ends(start: Start) -> None:
    first = Pretended()
    made = start("where", 1, launch=Mock(side_effect=[first, WorkerDied("no node is left")])).workers

    async def play() -> None:
        playing = asyncio.create_task(made.play(EPISODE, "one"))
        await asyncio.to_thread(first.asked.wait, paced(20))
        first.ends(LOST)
        await asyncio.wait_for(playing, paced(20))

    with pytest.raises(WorkerDied, match="^no node is left$"):
        asyncio.run(play())


def test_a_worker_needs_the_directory_of_the_run(play: Play, start: Start, tmp_path: Path) -> None:
    def launch(name: str) -> Callable[[], LocalProcess]:
        return lambda: LocalProcess(EpisodesConfig(function=f"{HERE}:directory"), str(tmp_path / name))

    with pytest.raises(ConfigError, match=r"/none' \(No such file or directory\); it must be at .* \(on "):
        play(start("directory", 1, launch=launch("none")), samples=1)
    outcomes = play(start("directory", 1, launch=launch("")), samples=1).outcomes
    assert [list(each.parts) for each in outcomes] == [[str(tmp_path)]] * 2


def test_a_worker_with_a_hanging_episode_is_replaced(
    play: Play, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "GRACE", 0.2)
    file = tmp_path / "pid"
    function = start("hangs_once", 1, {"file": str(file)})
    outcomes = play(function, samples=2, timeout=paced(3)).outcomes
    (late,) = [each for each in outcomes if isinstance(each, Failure)]
    hung = int(file.read_text())
    assert late.kind == "timeout" and outcomes.count(float(hung)) == 3  # which it played besides
    wait_for(lambda: not Path(f"/proc/{hung}").exists())
    pids = play(function, samples=1).outcomes
    assert len(set(pids)) == 1 and float(hung) not in pids


def test_a_coroutine_is_cancelled_and_its_worker_stays(
    play: Play, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "GRACE", paced(5))
    file = tmp_path / "pid"
    function = start("waits_once", 1, {"file": str(file)})
    outcomes = play(function, samples=2, timeout=paced(3)).outcomes
    assert [each.kind for each in outcomes if isinstance(each, Failure)] == ["timeout"]
    (worker,) = function.workers._all
    wait_for(lambda: not worker.playing)
    assert set(play(function, samples=1).outcomes) == {float(file.read_text())} and not worker.retired
