"""Workers of episodes on two nodes of a real Ray cluster, on this machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from corerl.cluster import living_nodes, own_address, ray_session
from corerl.rollout import EventLoop, Failure, Judged, Rollout
from corerl_agents import workers
from corerl_agents.config import EpisodesConfig
from corerl_agents.sampler import EpisodeSampler
from corerl_agents.workers import Workers
from plugins.agents.tests import worker_functions
from plugins.agents.tests.oracle import PARAMS, PROMPTS, TOKENIZER, Oracle, Play, assert_equal, engines
from plugins.agents.tests.test_commands import AGENT, alive
from plugins.agents.tests.test_workers import HERE, wait_for
from tests.cluster.nodes import Machines, machines
from tests.machine import paced
from tests.rollout.samplers import context

pytestmark = pytest.mark.processes

SOON = {"RAY_health_check_initial_delay_ms": "0", "RAY_health_check_period_ms": "500"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Machines]:
    """Two with CPUs; the head has none."""
    node = {"object_store_memory": 100 * 2**20}
    one, other = ({**node, "num_cpus": 1, "resources": {name: 1}} for name in ("one", "other"))
    with machines({**node, "num_cpus": 0, "include_dashboard": False}, one, other, **SOON) as found:
        with ray_session(address=found.address, cpus=1.0):
            yield found


class Nodes:
    """What a run samples with on these nodes."""

    def __init__(self, loop: EventLoop, **config: Any) -> None:
        self.loop = loop
        known = {"tokenizer": TOKENIZER, "generate": engines(Oracle()), "loop": loop, "seed": 7, "params": PARAMS}
        options = EpisodesConfig(workers=2, workers_on="cluster", **config)
        self.sampler = EpisodeSampler(options, context(environment={"CORERL_TEST_WORD": "3"}, **known))

    @property
    def workers(self) -> Workers:
        return self.sampler._function.workers  # type: ignore[attr-defined, no-any-return]

    @property
    def used(self) -> list[str]:
        return sorted(worker.process.node for worker in self.workers._all)  # type: ignore[attr-defined]

    def play(self, samples: int = 4) -> Rollout:
        return self.loop.run(self.sampler.sample(PROMPTS, rollout_step=5, samples=samples, params=PARAMS))


@pytest.fixture
def start(loop: EventLoop, nodes: Machines) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def started(**config: Any) -> Nodes:
        made.append(Nodes(loop, **config))
        return made[-1]

    yield started
    for each in made:
        each.sampler.close()


def parts(rollout: Rollout, name: str) -> list[float]:
    return [each.parts[name] for each in rollout.outcomes if isinstance(each, Judged)]


def test_episodes_on_both_nodes_equal_the_drivers(play: Play, start: Callable[..., Nodes]) -> None:
    on_nodes = start(function=f"{HERE}:two_turns_there")
    there, here = on_nodes.play(), play(worker_functions.two_turns_there)
    assert_equal(there, here)
    assert parts(there, "said") == parts(here, "said") and len(parts(there, "said")) == 8
    assert set(parts(there, "word")) == {3.0}
    assert on_nodes.used == sorted(living_nodes()) and len(on_nodes.used) == 2
    pids = {int(pid) for pid in parts(there, "pid")}
    assert len(pids) == 2
    on_nodes.sampler.close()
    wait_for(lambda: not any(map(alive, pids)))


def test_a_killed_worker_costs_its_commands(start: Callable[..., Nodes], tmp_path: Path) -> None:
    """Here one, which ends with it; the others ask the server at the driver's address."""
    file = tmp_path / "pids"
    on_nodes = start(
        command=[sys.executable, "-S", AGENT, "{base_url}", "{prompt_file}", f"once:{file}"], concurrency=1
    )

    def kill() -> None:
        wait_for(lambda: file.exists() and file.read_text().endswith("\n"))
        os.kill(int(file.read_text().split()[0]), signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    rollout = on_nodes.play()
    killing.join()
    (died,) = [each for each in rollout.outcomes if isinstance(each, Failure)]
    assert died.kind == "died"
    assert died.message.startswith(f"samplers.episodes.command '{sys.executable}' was running in a worker process that")
    assert "ended (SIGKILL), on prompt 40" in died.message
    assert parts(rollout, "at") == [float(own_address().replace(".", ""))] * 7
    wait_for(lambda: not any(alive(int(pid)) for pid in file.read_text().split()))
    assert on_nodes.used == sorted(living_nodes())  # it was replaced where it was


def test_a_worker_that_notices_nothing_is_killed(
    start: Callable[..., Nodes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "GRACE", 0.2)
    file = tmp_path / "pid"
    on_nodes = start(function=f"{HERE}:holds_the_gil_once", options={"file": str(file)}, timeout=paced(5))
    outcomes = on_nodes.play(samples=1).outcomes
    (late,) = [each for each in outcomes if isinstance(each, Failure)]
    hung, its_child = map(int, file.read_text().split())
    assert late.kind == "timeout" and float(hung) not in outcomes
    wait_for(lambda: not alive(hung) and not alive(its_child))
    wait_for(lambda: on_nodes.used == sorted(living_nodes()))


def test_a_lost_node_costs_the_episodes_there(start: Callable[..., Nodes], nodes: Machines, tmp_path: Path) -> None:
    """The last test: there is one node less from now on."""
    on_nodes = start(
        function=f"{HERE}:waits_for_a_word", options={"directory": str(tmp_path)}, concurrency=4, timeout=90.0
    )
    before = on_nodes.used
    assert len({*before}) == 2

    def lose() -> None:
        wait_for(lambda: len([file for file in tmp_path.iterdir() if file.read_text().endswith("\n")]) == 4)
        nodes.kill("other")
        wait_for(lambda: len(on_nodes.used) == 2 and len({*on_nodes.used}) == 1)  # with another worker
        (tmp_path / "word").touch()

    losing = threading.Thread(target=lose)
    losing.start()
    outcomes = on_nodes.play().outcomes
    losing.join()
    died = [each for each in outcomes if isinstance(each, Failure)]
    assert len(died) == 2 and outcomes.count(1.0) == 6
    assert all("was running in a worker process that ended (a worker of episodes on " in each.message for each in died)
    assert {*on_nodes.used} == living_nodes().keys() < {*before}
