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
from corerl_agents.workers import Gone, LocalProcess, PlayedByWorkers
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


def test_a_worker_asks_side_by_side(play: Play, start: Start) -> None:
    """The noise of requests side by side depends on whether one is answered before another one comes."""
    there = play(start("side_by_side", 2))
    assert there.batch.row_columns["episode"].tolist() == [each for each in range(8) for _ in range(2)]
    assert all(isinstance(each, float) for each in there.outcomes)


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


def test_a_worker_lost_before_its_start_is_replaced(play: Play, start: Start) -> None:
    """Its node is gone, say, as it is begun."""
    begun: list[LocalProcess] = []

    def launch() -> LocalProcess:
        lost = Gone("the node is gone", lost=True)
        begun.append(LocalProcess(EpisodesConfig(function=f"{HERE}:where")))
        if len(begun) == 1:
            begun[0].receive = Mock(side_effect=lost)  # type: ignore[method-assign]
        return begun[-1]

    pids = play(start("where", 1, launch=launch), samples=1).outcomes
    assert pids == [begun[1].process.pid] * 2
    wait_for(lambda: not begun[0].process.is_alive())


class Lost:
    """A process whose node is gone before it has started, once it has been given an episode."""

    process = Mock(is_alive=lambda: False)

    def __init__(self) -> None:
        self.over = threading.Event()

    def send(self, message: bytes) -> None:
        self.over.set()

    def receive(self) -> bytes:
        self.over.wait()
        raise Gone("its node is gone", lost=True)

    def kill(self) -> None:
        self.over.set()

    end = kill


def test_an_episode_of_a_worker_that_never_began_is_played(play: Play, start: Start) -> None:
    begun: list[LocalProcess | Lost] = []

    def launch() -> LocalProcess | Lost:
        begun.append(Lost() if len(begun) == 1 else LocalProcess(EpisodesConfig(function=f"{HERE}:where")))
        return begun[-1]

    function = start("where", 1, launch=launch)
    (one,) = {*play(function).outcomes}
    os.kill(int(one), signal.SIGKILL)
    wait_for(lambda: len(begun) == 2)
    outcomes = play(function).outcomes
    assert len(begun) == 3 and {*outcomes} == {float(begun[2].process.pid)} and len(outcomes) == 8


def test_where_no_worker_can_be_begun_the_run_ends(play: Play, start: Start) -> None:
    ends = LocalProcess(EpisodesConfig(function=f"{HERE}:ends_its_process"))
    launch = Mock(side_effect=[ends, WorkerDied("no node is left")])
    with pytest.raises(WorkerDied, match="^no node is left$"):
        play(start("ends_its_process", 1, launch=launch), samples=1)


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


class Slow:
    """A process that imports its function when it is told to, and plays each episode at once then."""

    process = Mock(is_alive=lambda: False)

    def __init__(self) -> None:
        self.imported = threading.Event()
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._messages.put(pickle.dumps(None))

    def send(self, message: bytes) -> None:
        number, *asked = pickle.loads(message)
        if asked:
            self._messages.put(pickle.dumps((number, None)))

    def receive(self) -> bytes:
        self.imported.wait()
        if not (message := self._messages.get()):
            raise Gone("killed")
        return message

    def kill(self) -> None:
        self.imported.set()
        self._messages.put(b"")

    end = kill


def test_workers_replaced_while_they_import_play_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "GRACE", 0.0)
    begun: list[Slow] = []

    def launch() -> Slow:
        begun.append(Slow())
        return begun[-1]

    play = start("where", 1, launch=launch).workers.play
    begun[0].kill()
    wait_for(lambda: len(begun) == 2)
    episode = Episode(prompt=PROMPTS[0], base_url="", server=Mock())

    async def three_episodes() -> list[Any]:
        given_up, other = (asyncio.create_task(play(episode, name)) for name in ("given up", "other"))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.to_thread(wait_for, lambda: len(begun) == 3)
        for slow in begun:
            slow.imported.set()
        return [await asyncio.wait_for(each, paced(20)) for each in (other, play(episode, "next"))]

    assert asyncio.run(three_episodes()) == [None, None]


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
