"""Groups of real processes, in one Ray session: what they answer, and how a group ends when a member of it fails."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corerl.cluster import group as group_module
from corerl.cluster import heartbeat
from corerl.cluster.arrangement import arrange
from corerl.cluster.group import RayGroup
from corerl.cluster.heartbeat import Pending, Watching
from corerl.cluster.placement import Slot, reserved
from corerl.cluster.process import CallResult
from corerl.cluster.runtime import put, ray_session
from corerl.errors import CorerlError, HookFailed, SaveFailed, WorkerDied, WrongState
from tests.ended import gone
from tests.forks.ray import CPUS
from tests.machine import paced

MEMBER = "tests.cluster.members:Member"
FOREVER = 600.0

Start = Callable[..., RayGroup]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first failure, others are waited for no longer than this."""
    monkeypatch.setattr(group_module, "GRACE_SECONDS", paced(1.0))


@pytest.fixture(scope="module")
def places(shared_ray: None) -> Iterator[list[Slot]]:
    """Five, of one CPU each."""
    with ray_session(address="", cpus=5):
        with reserved(arrange({"actor": 5}), timeout=paced(60.0)) as places:
            yield places["actor"]


@pytest.fixture(scope="module")
def slots(places: list[Slot]) -> list[Slot]:
    """Those that a test may fill."""
    return places[:3]


@pytest.fixture
def start(slots: list[Slot]) -> Iterator[Start]:
    """start(size) gives a group that has not constructed its objects yet; it ends with the test."""
    groups = []

    def start(size: int, target: str = MEMBER, **options: Any) -> RayGroup:
        names = [f"actor rank {rank}" for rank in range(size)]
        groups.append(RayGroup(names, target, slots[:size], {"CORERL_TEST_WORD": "set before import"}, **options))
        return groups[-1]

    yield start
    for group in groups:
        group.kill()


@pytest.fixture(scope="module")
def two(places: list[Slot]) -> Iterator[RayGroup]:
    """For tests that end none of them."""
    group = RayGroup(["actor rank 0", "actor rank 1"], MEMBER, places[3:], {})
    group.wait(group.construct([(0,), (1,)]))
    yield group
    group.kill()


def members(start: Start, size: int) -> RayGroup:
    group = start(size)
    group.wait(group.construct([(rank,) for rank in range(size)]))
    return group


def test_a_hung_member_is_killed_a_busy_one_not(start: Start) -> None:
    silence = paced(2.0)
    group = start(2, "tests.cluster.members:Loads", watching=Watching(health_timeout=silence))
    group.wait(group.construct([(0,), (1,)]))
    pids = group.call("pid")
    group.wait(group.start_each("init", [(1.25 * silence,), (0.0,)]))
    sleeping = group.start("sleep")
    os.kill(pids[1], signal.SIGSTOP)  # at once, though it was never heard of since it has started
    with pytest.raises(WorkerDied) as raised:
        group.wait(sleeping)
    assert raised.value.message.startswith(
        f"actor rank 1: its process was killed during sleep: no heartbeat for {silence:g} s (cluster.health_timeout): "
    )
    assert group.ended and gone(pids)


def test_a_failure_names_the_member_that_sent_no_heartbeat(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    group = members(start, 2)
    monkeypatch.setattr(heartbeat.Member, "silent", property(lambda member: member.name == "actor rank 1"))
    with pytest.raises(HookFailed, match="timed out in a collective; actor rank 1 had sent no heartbeat for a while$"):
        group.call("fail_after", [0.0, FOREVER], ["timed out in a collective", "never"])


def test_members_answer_in_order_with_what_each_was_asked(start: Start) -> None:
    group = members(start, 3)
    assert group.call("word") == ["set before import"] * 3
    pids = group.call("pid")
    assert len({*pids, os.getpid()}) == 4
    assert group.call("answer", "all") == [(0, "all"), (1, "all"), (2, "all")]
    assert group.wait(group.start_each("answer", [("a",), ("b",), ("c",)])) == [(0, "a"), (1, "b"), (2, "c")]
    assert group.wait(group.start_some("answer", {2: ("x",), 0: ("y",)})) == [(2, "x"), (0, "y")]
    # What was shared is read where it lies: nobody may write into it.
    assert group.call("total", put(np.arange(100_000, dtype=np.float64))) == [(4999950000.0, False)] * 3
    host, port, descriptor = group.listen(1)
    assert (host, descriptor > 2) == ("127.0.0.1", True)  # there is no other node
    assert group.call("listens_at", port)[1] == "127.0.0.1"
    group.kill()
    group.kill()
    assert gone(pids)
    with pytest.raises(WorkerDied, match=r"^actor rank 0 and its group have ended; answer can no longer be called$"):
        group.call("answer", "all")
    with pytest.raises(WorkerDied, match=r"^actor rank 0: its process died during listen "):
        group.listen(0)


def test_every_answer_is_reported_once(start: Start) -> None:
    told: list[tuple[str, str, CallResult]] = []

    def hear(name: str, pending: Pending, outcome: CallResult) -> None:
        told.append((name, pending.method, outcome))

    group = start(2, "tests.cluster.members:Shows", watching=Watching(on_answer=hear))
    names = ["actor rank 0", "actor rank 1"]
    began = time.time()
    group.wait(group.construct([(), ()]))
    assert sorted(each[:2] for each in told) == [(name, "start") for name in names]
    told.clear()
    working = group.start_each("work", [(1,), (2,)], at="3")
    assert began <= working.asked <= time.time()
    while not group.ready(working, 0.1):
        pass
    assert group.ready(working, 0.0)
    assert group.wait(working) == [1, 2]
    assert sorted(each[:2] for each in told) == [(name, "work at 3") for name in names]
    for name, _, outcome in told:
        spans = [f"part {part}" for part in range(1 + names.index(name))]
        assert (outcome.method, [span.name for span in outcome.spans]) == ("work", spans)
        assert working.asked <= outcome.started <= outcome.spans[0].started
        assert outcome.spans[-1].ended <= outcome.ended <= time.time()
    told.clear()
    assert [str(error) for error in group.answers(group.start("fail")).values()] == ["ask later"] * 2
    with pytest.raises(WrongState, match="ask later"):
        group.call("fail")
    assert sorted((name, str(outcome.error)) for name, _, outcome in told) == [
        (name, "ask later") for name in sorted(names * 2)
    ]


def test_the_first_failure_is_raised_and_ends_the_group(start: Start) -> None:
    group = members(start, 3)
    pids = group.call("pid")
    texts = ["connection to rank 2 lost", "never", "the cause\nin two lines"]
    with pytest.raises(HookFailed) as caught:
        group.call("fail_after", [0.3, FOREVER, 0.0], texts)
    assert caught.value.message == "actor rank 2: fail_after: ValueError: the cause"
    assert caught.value.details.endswith("then 1 of the 2 others failed too: actor rank 0")
    assert caught.value.details.startswith("actor rank 2: fail_after\nTraceback (most recent call last):")
    assert "raise ValueError(texts[self.index])" in caught.value.details
    assert "in two lines" in caught.value.details
    assert gone(pids)


def test_ray_is_told_no_variable_that_may_be_a_secret(slots: list[Slot], tmp_path: Path) -> None:
    given = {"CORERL_TEST_WORD": "s3cr3t", "API_KEY": "s3cr3t", "TMPDIR": str(tmp_path)}
    group = RayGroup(["actor rank 0"], MEMBER, slots[:1], {**given, "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "7"})
    try:
        group.wait(group.construct([(0,)]))
        assert (group.call("word"), group.call("threads")) == (["s3cr3t"], ["2"])
        assert group.call("temporary_directory") == [str(tmp_path)]
        (told,) = group.call("runtime_environment")
        assert json.loads(told)["env_vars"] == {
            "OMP_NUM_THREADS": "2",
            "PYTHONHASHSEED": "7",
            "RAY_worker_niceness": "0",
        }
    finally:
        group.kill()


def test_a_cluster_that_is_too_small_says_so_in_numbers(slots: list[Slot]) -> None:
    with pytest.raises(CorerlError) as caught:
        with reserved(arrange({"actor": 50, "engines": 2}, own_devices=["engines"], cpus=1.0, gpus=1.0), timeout=0.5):
            pass
    # Ray counts what an earlier test gave back a moment later.
    assert re.sub(r"CPU \d+ free", "CPU 61 free", caught.value.message) == (
        f"the cluster has no room for 52 bundles of {{'CPU': 1.0, 'GPU': 1.0}}: CPU 61 free of {CPUS}, 52 needed, "
        "GPU 0 free of 0, 52 needed; use fewer ranks or engines, or a larger cluster"
    )


def test_a_group_goes_on_after_a_refusal_that_changed_nothing(two: RayGroup) -> None:
    with pytest.raises(WrongState, match="ask later"):
        two.call("refuse", 1)
    assert two.call("refuse", 7) == [0, 1]


def test_a_failed_save_spares_ranks_that_still_write(two: RayGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "GRACE_SECONDS", 0.1)
    pending = two.start("save", 1.0)
    assert not two.ready(pending, timeout=0.5)
    with pytest.raises(SaveFailed, match="no space left"):
        two.wait(pending)
    assert two.call("written") == [False, True] and not two.ended


def test_a_call_aside_reaches_busy_processes(two: RayGroup) -> None:
    waiting = two.start("through")
    two.aside("open")
    assert two.wait(waiting) == [True, True]


def test_a_group_is_ready_once_a_member_failed(start: Start) -> None:
    group = members(start, 2)
    pending = group.start("die", 1)
    deadline = time.monotonic() + paced(60.0)
    while not group.ready(pending, timeout=0.1):
        assert time.monotonic() < deadline
    with pytest.raises(WorkerDied, match="actor rank 1"):
        group.wait(pending)


def test_all_threads_of_a_process_have_the_drivers_niceness(two: RayGroup) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert {each for found in two.call("niceness") for each in found} == {own}


def test_two_calls_of_a_process_are_counted_separately(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "COUNT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.05)
    group = start(2, "tests.cluster.members:Counts", threads=3)
    group.wait(group.construct([(), ()]))
    first, second = group.start_each("work", [(3,), (4,)]), group.start_some("work", {0: (7,)})
    told: list[int] = []

    def counted(ended: int) -> None:
        told.append(ended)
        if told[-2:] == [3, 4]:
            group.call("open")

    assert group.answers(first, on_ended=counted) == {0: 3, 1: 4}
    assert {3, 4} <= set(told) and 7 not in told
    assert group.wait(second) == [7]


def first_answers(group: RayGroup, pending: Pending) -> dict[int, Any]:
    """The first answers that come."""
    deadline = time.monotonic() + paced(60.0)
    while not (found := group.answers(pending, timeout=0.1)):
        assert time.monotonic() < deadline
    return found


def test_a_group_grows_and_shrinks_while_calls_run(start: Start, slots: list[Slot]) -> None:
    group = members(start, 1)
    (first,) = group.call("pid")
    group.grow(["actor rank 1", "actor rank 2"], slots[1:], [(1,), (2,)])
    assert (len(group), group.nodes) == (3, [slot.node for slot in slots])
    assert group.call("answer", "all") == [(0, "all"), (1, "all"), (2, "all")]
    pids = group.call("pid")
    assert pids[0] == first and len(set(pids)) == 3

    waiting = group.start("sleep")
    group.shrink(2)
    assert (len(group), group.names, group.nodes) == (1, ["actor rank 0"], [slots[0].node])
    group.grow(["critic rank 0"], slots[1:2], [(2,)])  # in the place of one whose call is still looked at
    assert gone(pids[1:])
    found = first_answers(group, waiting)
    assert {member: error.message.partition(" (")[0] for member, error in found.items()} == {
        1: "actor rank 1: its process died during sleep",
        2: "actor rank 2: its process died during sleep",
    }
    assert group.wait(group.start_some("answer", {1: ("x",)})) == [(2, "x")]
    with pytest.raises(WorkerDied, match=r"^actor rank 1: its process died during sleep ") as raised:
        group.wait(waiting)
    assert raised.value.details.endswith("then 1 of the 2 others failed too: actor rank 2")
    with pytest.raises(WorkerDied, match=r"^actor rank 0 and its group have ended \(.*\); grow can no longer be "):
        group.grow(["actor rank 2"], slots[2:], [(2,)])


def test_members_that_do_not_start_are_not_added(start: Start, slots: list[Slot]) -> None:
    group = members(start, 1)
    with pytest.raises(HookFailed, match=r"^actor rank 2: start: TypeError: .*missing 1 required positional argument"):
        group.grow(["actor rank 1", "actor rank 2"], slots[1:], [(1,), ()])
    assert (group.names, group.nodes) == (["actor rank 0"], [slots[0].node])
    assert group.call("answer", "all") == [(0, "all")]
