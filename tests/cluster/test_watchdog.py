"""Whom the others wait for: told by name, from statuses by hand and from real ranks that are late."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from corerl.cluster.arrangement import arrange
from corerl.cluster.group import RayGroup, Watching
from corerl.cluster.placement import reserved
from corerl.cluster.runtime import ray_session
from corerl.cluster.watchdog import Status, late, listed, sentence
from tests.cluster.ranks import RAYS_OWN
from tests.machine import paced

RANK = "tests.cluster.ranks:Rank"
NAMES = [f"actor rank {rank}" for rank in range(8)]


def at(collectives: dict[str, int], *, waits: bool = False, phase: str = "") -> Status:
    return Status(phase=phase, place="step.py:1 in train", waits=waits, collectives=collectives)


def test_who_has_begun_fewer_collectives_and_is_in_none_is_late() -> None:
    assert late({0: at({"all": 4}, waits=True), 1: at({"all": 3}), 2: at({"all": 4}, waits=True)}) == [1]


def test_of_those_behind_only_the_one_that_waits_for_nobody_is_late() -> None:
    # Shards of [0, 1] and [2, 3], then replicas [0, 2] and [1, 3]: 3 is late, 2 waits for it, and 0 waits for 2.
    statuses = {
        0: at({"s01": 1, "r02": 1}, waits=True),
        1: at({"s01": 1, "r13": 1}, waits=True),
        2: at({"s23": 1, "r02": 0}, waits=True),
        3: at({"s23": 0, "r13": 0}),
    }
    assert late(statuses) == [3]
    # As NCCL has it: nobody's stack is in a collective, the counts alone tell.
    assert late({rank: Status(collectives=status.collectives) for rank, status in statuses.items()}) == [3]


def test_where_counts_do_not_tell_the_one_that_is_in_no_collective_is_late() -> None:
    assert late({0: at({}, waits=True), 1: at({}), 2: at({}, waits=True)}) == [1]


def test_one_that_does_not_say_where_it_is_counts_as_late() -> None:
    assert late({0: at({"all": 4}, waits=True), 1: None}) == [1]


def test_where_all_are_at_work_nobody_is_late() -> None:
    assert late({0: at({"all": 4}), 1: at({"all": 4})}) == []


def test_the_sentence_names_who_is_late_who_waits_and_who_is_done() -> None:
    statuses = {0: at({"all": 1}, waits=True, phase="load"), 1: at({"all": 0}, phase="model build")}
    assert sentence(NAMES, "init", 75.4, statuses, [2, 3, 4, 6]) == (
        "init has taken 75 s: actor rank 1 is in 'model build' (step.py:1 in train); actor rank 0 is waiting for it in "
        "'load'; actor ranks 2-4, 6 are done"
    )
    alone = sentence(["engine-0"], "generate", 60.0, {0: at({})}, [])
    assert alone == "generate has taken 60 s: engine-0 is at work (step.py:1 in train)"
    silent = sentence(NAMES, "start", 60.0, {0: None}, [1])
    assert silent == (
        "start has taken 60 s: actor rank 0 does not report where it is: it has not started yet, or native code is "
        "holding Python's GIL; actor rank 1 is done"
    )


def test_of_many_only_some_are_described() -> None:
    names = [f"actor rank {rank}" for rank in range(100)]
    text = sentence(names, "init", 60.0, {rank: at({}, phase="load") for rank in range(100)}, [])
    assert text.count("is in 'load'") == 8
    assert text.endswith("; 92 more, not listed")


def test_names_are_listed_as_ranges_where_they_are_ranks_of_one_role() -> None:
    assert listed(["actor rank 5", "actor rank 0", "actor rank 1", "actor rank 2"]) == "actor ranks 0-2, 5"
    assert listed(["actor rank 3"]) == "actor rank 3"
    assert listed(["engine-0", "engine-1"]) == "engine-0, engine-1"
    assert listed(["actor rank 0", "critic rank 0"]) == "actor rank 0, critic rank 0"


class Told:
    """What the watchdog says. Whoever it says is held up is let go, so that the calls below end only once it has."""

    def __init__(self, gate: Path) -> None:
        self.gate = str(gate)
        os.mkfifo(gate)
        self.texts: list[str] = []

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        if " in hold)" in text:
            with open(self.gate, "w"):
                pass

    def of(self, method: str) -> str:
        """The last that was said of a call."""
        return [text for text in self.texts if text.startswith(f"{method} has taken ")][-1]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(tmp_path_factory.mktemp("gates") / "gate")


@pytest.fixture(scope="module")
def ranks(told: Told, shared_ray: None) -> Iterator[RayGroup]:
    """Four that have met; the last was held up while it built its model."""
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with ray_session(address="", cpus=4), reserved(arrange({"ranks": 4}), timeout=paced(60.0)) as slots:
        group = RayGroup(NAMES[:4], RANK, slots["ranks"], environment, watching=Watching(notify=told, seconds=1.0))
        host, port, listening = group.listen(0)
        group.wait(group.construct([(rank, 4) for rank in range(4)]))
        meeting = [(host, port, listening if rank == 0 else None, told.gate if rank == 3 else "") for rank in range(4)]
        group.wait(group.start_each("init", meeting))
        yield group
        group.kill()


def test_on_one_machine_ranks_meet_and_talk_over_its_loopback_interface_alone(ranks: RayGroup) -> None:
    assert ranks.call("hosts") == [["127.0.0.1", RAYS_OWN]] * 4


def test_a_rank_that_is_late_in_its_beginning_is_named_with_its_phase(ranks: RayGroup, told: Told) -> None:
    assert re.fullmatch(
        r"init has taken \d+ s: actor rank 3 is in 'model build' \(cluster/ranks\.py:\d+ in hold\); "
        r"actor ranks 0-2 are waiting for it in 'load'",
        told.of("init"),
    )


def test_in_a_step_the_rank_that_the_others_wait_for_is_named_and_not_those_that_wait(
    ranks: RayGroup, told: Told
) -> None:
    assert ranks.wait(ranks.start_each("train", [(told.gate,), ("",), ("",), ("",)])) == [10.0] * 4
    assert re.fullmatch(
        r"train has taken \d+ s: actor rank 0 is at work \(cluster/ranks\.py:\d+ in hold\); "
        r"actor ranks 1-3 are waiting for it",
        told.of("train"),
    )


def test_through_a_chain_of_groups_the_one_that_all_wait_for_is_named(ranks: RayGroup, told: Told) -> None:
    assert ranks.wait(ranks.start_each("pairs", [("",), ("",), (told.gate,), ("",)])) == [10.0] * 4
    assert re.fullmatch(
        r"pairs has taken \d+ s: actor rank 2 is at work \(cluster/ranks\.py:\d+ in hold\); "
        r"actor ranks 0-1, 3 are waiting for it",
        told.of("pairs"),
    )


def test_a_call_that_gets_on_is_left_alone_however_long_it_takes(ranks: RayGroup, told: Told) -> None:
    before = list(told.texts)
    pending = ranks.start("work", 5.0)
    assert not ranks.ready(pending, timeout=1.5)  # looks as well
    ranks.wait(pending)
    assert pending.watch.due is not None and pending.watch.due > 2.0  # it has looked twice
    assert told.texts == before
