"""Groups of real processes, in one Ray session: what they answer, and how a group ends when a member of it fails."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from attrs import evolve
from ray.exceptions import OutOfMemoryError

from corerl.cluster import group as group_module
from corerl.cluster import services
from corerl.cluster.arrangement import arrange
from corerl.cluster.group import Pending, RayGroup, Watching
from corerl.cluster.objects import put
from corerl.cluster.placement import Slot, reserved
from corerl.cluster.process import Outcome, fair_threads
from corerl.cluster.pulse import Bounds
from corerl.cluster.runtime import ray_session
from corerl.config.variables import READ_AT_START
from corerl.errors import CorerlError, EngineFailed, HookFailed, WorkerDied, WrongState
from tests.forks.ray import fork_workers
from tests.machine import paced

MEMBER = "tests.cluster.members:Member"
FOREVER = 600.0

Start = Callable[..., RayGroup]


@pytest.fixture(scope="module")
def slots() -> Iterator[list[Slot]]:
    """Three, of one CPU each, of a Ray that has no more than one to spare."""
    fork_workers()
    with ray_session(address="", cpus=4):
        with reserved(arrange({"actor": 3}), timeout=paced(60.0)) as slots:
            yield slots["actor"]


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


def members(start: Start, size: int) -> RayGroup:
    group = start(size)
    group.wait(group.construct([(rank,) for rank in range(size)]))
    return group


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pids: Sequence[int]) -> list[int]:
    """Those that are still there after a while; Ray ends processes in the background."""
    deadline = time.monotonic() + paced(30.0)
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


def test_a_member_that_freezes_is_ended_and_named_and_one_that_only_works_or_loads_long_is_not(start: Start) -> None:
    silence = paced(2.0)
    group = start(2, "tests.cluster.members:Loads", watching=Watching(bounds=Bounds(silence=silence)))
    group.wait(group.construct([(0,), (1,)]))
    pids = group.call("pid")
    group.wait(group.start_each("init", [(1.25 * silence,), (0.0,)]))
    sleeping = group.start("sleep")
    os.kill(pids[1], signal.SIGSTOP)  # at once, though it was never heard of since it has started
    with pytest.raises(WorkerDied) as raised:
        group.wait(sleeping)
    assert raised.value.message.startswith(
        f"actor rank 1: its process had not said for {silence:g} s (cluster.health_timeout) where it is in sleep, and"
    )
    assert group.ended and wait_until_gone(pids) == []


def test_a_rank_that_does_not_get_on_with_its_start_is_ended_and_named_and_not_one_that_waits_for_it(
    start: Start, tmp_path: Path
) -> None:
    bound = paced(4.0)
    group = start(2, "tests.cluster.ranks:Rank", watching=Watching(bounds=Bounds(start=bound)))
    host, port, listening = group.listen(0)
    group.wait(group.construct([(0, 2), (1, 2)]))
    os.mkfifo(tmp_path / "gate")  # which nobody opens
    with pytest.raises(WorkerDied) as raised:
        group.wait(group.start_each("init", [(host, port, listening, ""), (host, port, None, str(tmp_path / "gate"))]))
    assert re.fullmatch(
        rf"actor rank 1: its process had not started after {bound:g} s of work in init \(cluster\.start_timeout\), and "
        r"was ended: actor rank 1 is in 'model build' \(cluster/ranks\.py:\d+ in hold\); raise cluster\.start_timeout "
        "if it may take that long",
        raised.value.message,
    )


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
    for arguments in ([], [(1,)], [(1,)] * 4):
        with pytest.raises(
            CorerlError,
            match=rf"^answer: got {len(arguments)} sets of arguments, expected one for each of 3 processes$",
        ):
            group.start_each("answer", arguments)
        with pytest.raises(
            CorerlError, match=rf"^start: got {len(arguments)} sets of arguments, expected one for each of 3 processes$"
        ):
            group.construct(arguments)
    group.kill()
    group.kill()
    assert wait_until_gone(pids) == []
    with pytest.raises(WorkerDied, match=r"^actor rank 0 and its group have ended; answer can no longer be called$"):
        group.call("answer", "all")
    with pytest.raises(WorkerDied, match=r"^actor rank 0: its process died during listen "):
        group.listen(0)


def test_a_death_of_rays_while_a_call_is_given_to_members_is_heard_once_all_have_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, watch = members(start, 3), services._watch
    assert watch is not None
    actors, given = list(group._actors), []

    class Tells:
        """An actor, in whose call the death of one of Ray's processes is told."""

        def __init__(self, member: int) -> None:
            self.member, self.call = member, self

        def remote(self, *args: Any) -> Any:
            ref = actors[self.member].call.remote(*args)
            watch.died = watch.services[0]
            signal.raise_signal(services.INTERRUPT)
            given.append(self.member)
            return ref

    monkeypatch.setattr(watch, "died", None)  # afterwards too
    monkeypatch.setattr(group, "_actors", [Tells(member) for member in range(3)])
    with pytest.raises(KeyboardInterrupt):
        group.start("word")
    assert given == [0, 1, 2]
    monkeypatch.undo()
    assert group.call("word") == ["set before import"] * 3


def test_every_answer_is_told_of_once_however_often_it_is_looked_at(start: Start) -> None:
    told: list[tuple[str, str, Outcome]] = []

    def hear(name: str, pending: Pending, outcome: Outcome) -> None:
        told.append((name, pending.method, outcome))

    group = start(2, "tests.cluster.members:Shows", watching=Watching(on_answer=hear))
    names = ["actor rank 0", "actor rank 1"]
    began = time.time()
    group.wait(group.construct([(), ()]))
    assert sorted(each[:2] for each in told) == [(name, "start") for name in names]
    told.clear()
    working = group.start_each("work", [(1,), (2,)])
    working = evolve(working, method="work at 3")  # as callers say more of a call than its verb
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


def test_a_rank_that_waits_in_a_collective_is_seen_there(start: Start, tmp_path: Path) -> None:
    told: dict[tuple[str, str], Outcome] = {}

    def hear(name: str, pending: Pending, outcome: Outcome) -> None:
        told[name, pending.method] = outcome

    group = start(2, "tests.cluster.ranks:Rank", watching=Watching(on_answer=hear))
    group.wait(group.construct([(0, 2), (1, 2)]))
    host, port, listening = group.listen(0)
    group.wait(group.start_each("init", [(host, port, listening, ""), (host, port, None, "")]))
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    training = group.start_each("train", [("",), (str(gate),)])
    with gate.open("w"):  # the second has come to it, and goes on when it is closed
        time.sleep(0.5)
        opened = time.time()
    assert group.wait(training) == [3.0, 3.0]
    outcome = told["actor rank 0", "train"]
    (wait,) = [wait for wait in outcome.waits if wait.started <= opened <= wait.ended]
    assert wait.name == "all_reduce"
    assert outcome.started <= wait.started and wait.ended <= outcome.ended
    assert not any(wait.started < opened for wait in told["actor rank 1", "train"].waits)


def test_the_first_failure_is_raised_and_ends_the_others_whatever_they_do(start: Start) -> None:
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
    assert wait_until_gone(pids) == []


def test_a_killed_member_ends_the_group_with_its_name_and_what_it_was_doing(start: Start) -> None:
    group = members(start, 2)
    pids = group.call("pid")
    with pytest.raises(WorkerDied) as caught:
        group.call("die", 1)
    assert caught.value.message.startswith("actor rank 1: its process died during die (")
    assert "\n" not in caught.value.message
    assert "others failed" not in caught.value.details
    assert wait_until_gone(pids) == []


def test_a_member_that_ray_ends_for_want_of_memory_has_died(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    group = members(start, 2)
    pids = group.call("pid")

    def get(ref: Any, real: Any = ray.get) -> Any:
        raise OutOfMemoryError("1 worker(s) were killed due to the node running low on memory")

    with monkeypatch.context() as patch:
        patch.setattr(group_module.ray, "get", get)
        answers = group.answers(group.start_some("pid", {1: ()}))
        assert isinstance(answers[1], WorkerDied)  # as an engine that is restarted
        with pytest.raises(
            WorkerDied, match=r"^actor rank 0: Ray ended its process during pid because the machine ran "
        ):
            group.call("pid")  # as a rank, with which all end
    assert wait_until_gone(pids) == []


def test_a_result_that_cannot_be_pickled_is_an_error_that_names_the_member(start: Start) -> None:
    group = members(start, 1)
    with pytest.raises(CorerlError) as caught:
        group.call("lock")
    assert caught.value.message == (
        "actor rank 0: the result of lock could not be transferred: TypeError: cannot pickle '_thread.lock' object"
    )


def test_an_object_that_cannot_be_made_is_an_error_of_its_start(start: Start) -> None:
    group = start(1, "tests.cluster.members:Missing")
    with pytest.raises(HookFailed) as caught:
        group.wait(group.construct([(0,)]))
    assert caught.value.message == (
        "actor rank 0: start: AttributeError: module 'tests.cluster.members' has no attribute 'Missing'"
    )


def test_each_process_needs_a_seat(slots: list[Slot]) -> None:
    with pytest.raises(CorerlError, match=r"^got 1 processes and 3 slots; each process needs one slot$"):
        RayGroup(["actor rank 0"], MEMBER, slots, {})


def test_seats_are_shares_of_their_bundles(slots: list[Slot]) -> None:
    assert [(slot.cpus, slot.gpus) for slot in slots] == [(1.0, 0.0)] * 3
    assert [(slot.bundles[0].index, slot.neighbors) for slot in slots] == [(0, 3), (1, 3), (2, 3)]
    # One CPU of four is left, and two processes share it.
    with reserved(arrange({"actor": 1, "engines": 1}), timeout=paced(60.0)) as both:
        seats = [(slot.bundles[0].index, slot.cpus) for slot in (*both["actor"], *both["engines"])]
        assert seats == [(0, 0.5), (0, 0.5)]


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


@pytest.mark.parametrize(
    ("name", "early"),
    [("LD_PRELOAD", True), ("PYTHONPATH", True), ("OMP_NUM_THREADS", True), ("TMPDIR", False), ("PATH", False),
     ("NCCL_DEBUG", False), ("HF_TOKEN", False), ("WANDB_API_KEY", False), ("PATH_TO_KEY", False), ("OLD_KEY", False),
     ("LD_SDK_KEY", False), ("PYTHON_API_TOKEN", False), ("MALLOC_ARENA_MAX", True), ("RAY_AUTH_TOKEN", False)],
)  # fmt: skip
def test_only_what_is_read_as_a_process_starts_goes_through_ray(name: str, early: bool) -> None:
    assert bool(READ_AT_START.match(name)) is early


def test_threads_are_those_that_a_process_is_started_with_or_a_fair_share(slots: list[Slot]) -> None:
    def threads(**environment: str) -> list[str]:
        group = RayGroup(["actor rank 0"], MEMBER, slots[:1], environment)
        try:
            group.wait(group.construct([(0,)]))
            return group.call("threads")
        finally:
            group.kill()

    assert threads(OMP_NUM_THREADS="3") == ["3"]
    fair = str(fair_threads(3))  # one, which Ray would give too, where there are fewer than twelve cores
    assert threads() == [os.environ.get("OMP_NUM_THREADS", fair)]


def test_a_cluster_that_is_too_small_says_what_it_has_and_what_is_asked(slots: list[Slot]) -> None:
    with pytest.raises(CorerlError) as caught:
        with reserved(arrange({"actor": 50, "engines": 2}, own_devices=["engines"], cpus=1.0, gpus=1.0), timeout=0.5):
            pass
    # Ray counts what an earlier test gave back a moment later.
    assert caught.value.message.replace("CPU 0 free", "CPU 1 free") == (
        "the cluster has no room for 52 bundles of {'CPU': 1.0, 'GPU': 1.0}: CPU 1 free of 4, 52 needed, "
        "GPU 0 free of 0, 52 needed; use fewer ranks or engines, or a larger cluster"
    )


def test_ray_that_cannot_start_is_one_line(slots: list[Slot], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # else the one that there is would do
    with pytest.raises(CorerlError, match=r"^cannot start Ray on this machine: ") as caught:
        with ray_session(address="", cpus=1):
            pass
    assert "\n" not in caught.value.message


def test_a_group_goes_on_after_a_refusal_that_changed_nothing(start: Start) -> None:
    group = members(start, 2)
    with pytest.raises(WrongState, match="ask later"):
        group.call("refuse", 1)
    assert group.call("refuse", 7) == [0, 1]


def test_what_all_processes_wait_in_is_let_go_by_a_call_aside(start: Start) -> None:
    group = members(start, 2)
    waiting = group.start("through")
    group.aside("open")
    assert group.wait(waiting) == [True, True]


def test_a_death_is_an_answer_while_others_still_work(start: Start) -> None:
    group = members(start, 2)
    pending, found = group.start("die", 1), {}
    while not found:
        found = group.answered(pending, 0.1)
    assert list(found) == [1] and isinstance(found[1], WorkerDied)


def test_what_waits_in_one_thread_is_let_go_by_a_call_in_the_other(start: Start) -> None:
    group = start(1, threads=2)
    group.wait(group.construct([(0,)]))
    waiting = group.start("through")
    assert not group.ready(waiting, timeout=0.2)
    group.call("open")
    assert group.wait(waiting) == [True]


def test_a_group_is_ready_once_a_member_failed_though_the_others_never_answer(start: Start) -> None:
    group = members(start, 2)
    pending = group.start("die", 1)
    deadline = time.monotonic() + paced(60.0)
    while not group.ready(pending, timeout=0.1):
        assert time.monotonic() < deadline
    with pytest.raises(WorkerDied, match="actor rank 1"):
        group.wait(pending)


def test_all_threads_of_a_process_have_the_drivers_niceness(start: Start) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    (found,) = members(start, 1).call("niceness")
    assert set(found) == {own}


def test_each_of_two_calls_of_a_process_is_counted_by_itself(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "COUNT_SECONDS", 0.05)
    group = start(2, "tests.cluster.members:Counts", threads=3)
    group.wait(group.construct([(), ()]))
    first, second = group.start_each("work", [(3,), (4,)]), group.start_some("work", {0: (7,)})
    told: list[dict[int, int | None]] = []

    def counted(ended: Mapping[int, int | None]) -> None:
        told.append(dict(ended))
        if ended == {0: 3, 1: 4}:
            group.call("open")

    assert group.answers(first, counted) == {0: 3, 1: 4}
    assert {0: 3, 1: 4} in told
    assert not any(7 in ended.values() for ended in told)
    assert group.wait(second) == [7]


@pytest.mark.parametrize(("parts", "spoken"), [(0, 2), (1, 1)])
def test_of_a_call_that_counts_the_watchdog_speaks_when_nothing_ends(
    start: Start, monkeypatch: pytest.MonkeyPatch, parts: int, spoken: int
) -> None:
    monkeypatch.setattr(group_module, "SETTLE_SECONDS", 0.05)
    heard: list[str] = []
    group: RayGroup

    def notify(text: str) -> None:
        heard.append(text)
        if len(heard) == spoken:
            group.call("open")

    group = start(1, "tests.cluster.members:Counts", threads=2, watching=Watching(notify=notify, seconds=0.2))
    group.wait(group.construct([()]))
    pending = group.start("work", parts)
    assert group.answers(pending) == {0: parts}
    assert heard and all(
        re.fullmatch(rf"work has taken \d+ s: actor rank 0 is at work \(.*\), with {parts} of 10 samples done", text)
        for text in heard
        if text.startswith("work ")
    )
    # What had ended at the first look is no reason to speak; that nothing has ended since is.
    assert pending.watch.ended == {0: parts}


def test_foreign_errors_become_the_kind_that_the_group_was_given(start: Start) -> None:
    group = start(1, failure=EngineFailed)
    group.wait(group.construct([(0,)]))
    with pytest.raises(EngineFailed, match="actor rank 0: fail_after: ValueError: out of tokens"):
        group.call("fail_after", [0.0], ["out of tokens"])


def first_answers(group: RayGroup, pending: Pending) -> dict[int, Any]:
    """The first answers that come."""
    deadline = time.monotonic() + paced(60.0)
    while not (found := group.answered(pending, 0.1)):
        assert time.monotonic() < deadline
    return found


def test_members_that_come_later_answer_as_the_others_and_a_call_of_one_that_goes_ends_as_its_process_does(
    start: Start, slots: list[Slot]
) -> None:
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
    assert wait_until_gone(pids[1:]) == []
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


def test_members_that_do_not_start_leave_the_group_as_it_was(start: Start, slots: list[Slot]) -> None:
    group = members(start, 1)
    with pytest.raises(HookFailed, match=r"^actor rank 2: start: TypeError: .*missing 1 required positional argument"):
        group.grow(["actor rank 1", "actor rank 2"], slots[1:], [(1,), ()])
    with pytest.raises(CorerlError, match=r"^got 1 processes and 2 slots; each process needs one slot$"):
        group.grow(["actor rank 1"], slots[1:], [(1,)])
    assert (group.names, group.nodes) == (["actor rank 0"], [slots[0].node])
    assert group.call("answer", "all") == [(0, "all")]


@pytest.mark.nightly
def test_a_member_that_came_later_and_freezes_is_ended_too_and_one_that_is_gone_is_not_looked_for(
    start: Start, slots: list[Slot]
) -> None:
    silence = paced(2.0)
    group = start(1, watching=Watching(bounds=Bounds(silence=silence)))
    group.wait(group.construct([(0,)]))
    group.grow(["actor rank 1", "actor rank 2"], slots[1:], [(1,), (2,)])
    pids = group.call("pid")
    os.kill(pids[2], signal.SIGSTOP)
    group.shrink(1)
    time.sleep(1.5 * silence)
    assert group.call("pid") == pids[:2]
    sleeping = group.start_some("sleep", {1: ()})
    os.kill(pids[1], signal.SIGSTOP)
    assert first_answers(group, sleeping)[1].message.startswith(
        f"actor rank 1: its process had not said for {silence:g} s ("
    )
