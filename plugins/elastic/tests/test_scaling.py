"""How other sizes are asked for while a run goes on: by files, and by a function that is told what steps took."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.errors import ConfigError, CorerlError
from corerl_elastic import scaling
from corerl_elastic.scaling import (
    ANSWER,
    REQUEST,
    SETTLED,
    Answer,
    Devices,
    Request,
    Scaling,
    Sizing,
    Spent,
    answer,
    ask,
    asked,
    balance,
)

NONE_MORE = Devices(reserved=4, unused=0, free=0)
DONE = Answer(changed=("actor: 1 rank -> 2 ranks", "engines: 2 -> 1"))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "LOOK_SECONDS", 0.0)


# ---- requests and answers in files -----------------------------------------------------------------------------------


def steps(*each: Callable[[], object]) -> Callable[[], bool]:
    """`runs` of a run that does one thing between two looks, and has ended once all are done."""
    left = iter(each)

    def runs() -> bool:
        do = next(left, None)
        if do is not None:
            do()
        return do is not None

    return runs


def test_a_request_is_taken_and_answered_once(tmp_path: Path) -> None:
    told: list[str] = []
    taken: list[Request | None] = []

    def take() -> None:
        assert len(told) == 1  # before anything has come of it
        taken.extend([asked(tmp_path), asked(tmp_path)])

    def reply() -> None:
        assert isinstance(taken[0], Request)
        answer(tmp_path, taken[0], DONE)

    assert asked(tmp_path) is None
    sizes = ["roles.actor.ranks=2", "rollout.replicas=1"]
    found = ask(tmp_path, sizes, runs=steps(take, reply, list), notify=told.append)
    assert found == DONE
    assert taken[0] is not None and taken[0].overrides == tuple(sizes)
    assert taken[1] is None and asked(tmp_path) is None
    assert told == ["the resize takes effect after the current step"]
    assert [path.name for path in tmp_path.iterdir()] == [ANSWER]


def test_an_answer_to_an_earlier_request_is_not_taken(tmp_path: Path) -> None:
    answer(tmp_path, Request("earlier", ()), Answer(changed=("of another",)))

    def reply() -> None:
        request = asked(tmp_path)
        assert request is not None
        answer(tmp_path, request, DONE)

    assert ask(tmp_path, [], runs=steps(list, list, reply, list), notify=[].append) == DONE


def test_a_second_request_is_refused_while_one_waits_which_stays(tmp_path: Path) -> None:
    (tmp_path / REQUEST).write_text(json.dumps({"id": "first", "overrides": ["rollout.replicas=1"]}))
    with pytest.raises(ConfigError, match=f"{REQUEST}: another request waits for the end of a step; wait for it, or"):
        ask(tmp_path, ["rollout.replicas=2"], runs=lambda: True, notify=[].append)
    assert asked(tmp_path) == Request("first", ("rollout.replicas=1",))


def test_a_run_that_ends_unanswered_leaves_no_request(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{tmp_path}: the run has ended before it could change its sizes$"):
        ask(tmp_path, ["rollout.replicas=2"], runs=steps(list, list), notify=[].append)
    assert asked(tmp_path) is None


def test_whoever_stops_waiting_takes_back_only_the_own_request(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(tmp_path, ["rollout.replicas=2"], runs=steps(interrupt), notify=[].append)
    assert asked(tmp_path) is None

    def another_comes() -> None:
        taken = asked(tmp_path)
        assert taken is not None
        (tmp_path / REQUEST).write_text(json.dumps({"id": "next", "overrides": []}))
        answer(tmp_path, taken, DONE)

    assert ask(tmp_path, [], runs=steps(another_comes, list), notify=[].append) == DONE
    assert asked(tmp_path) == Request("next", ())


@pytest.mark.parametrize("text", ["{", "[]", '{"id": "x"}', '{"id": "x", "overrides": 3}'])
def test_an_unreadable_request_is_one_line_and_gone(tmp_path: Path, text: str) -> None:
    (tmp_path / REQUEST).write_text(text)
    with pytest.raises(ConfigError, match=rf"^{tmp_path / REQUEST} cannot be read \(.*\Z"):
        asked(tmp_path)
    assert asked(tmp_path) is None


def test_only_a_file_of_the_runs_user_is_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / REQUEST)  # to read it would wait for ever
    with pytest.raises(ConfigError, match="is no file of this user's; remove it"):
        asked(tmp_path)
    (tmp_path / REQUEST).unlink()
    (tmp_path / REQUEST).write_text('{"id": "x", "overrides": []}')
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="is no file of this user's; remove it"):
        asked(tmp_path)


def test_a_rejected_change_waits_for_other_sizes_or_more_devices() -> None:
    scaling = Scaling(name="more", scaler=lambda sizing: {"rollout.replicas": 3})
    sizes, more = {"roles.actor.ranks": 1, "rollout.replicas": 2}, ["rollout.replicas=3"]
    one, unused = evolve(NONE_MORE, free=1), evolve(NONE_MORE, unused=2)
    assert scaling.wanted(1, sizes, NONE_MORE) == more
    scaling.refused(more, NONE_MORE)
    assert scaling.wanted(2, sizes, NONE_MORE) == []
    assert scaling.wanted(3, sizes, one) == more
    scaling.refused(more, one)
    assert scaling.wanted(4, sizes, NONE_MORE) == scaling.wanted(5, sizes, one) == []
    assert scaling.wanted(6, sizes, unused) == more
    scaling.refused(more, unused)
    assert scaling.wanted(7, sizes, unused) == []
    assert scaling.wanted(8, {**sizes, "roles.actor.ranks": 2}, unused) == more
    assert scaling.wanted(9, sizes, unused) == more


# ---- a function that decides -----------------------------------------------------------------------------------------

SIZES = {"roles.actor.ranks": 2, "rollout.replicas": 2}


def scaling_by(function: Callable[[Sizing], Any]) -> Scaling:
    """One that has a step behind it."""
    made = Scaling(name="mine:decide", scaler=function)
    made.step_done({"time/step": 1.0}, SIZES)
    return made


def wanted(function: Callable[[Sizing], Any], sizes: Mapping[str, int] = SIZES) -> list[str]:
    return scaling_by(function).wanted(1, sizes, NONE_MORE)


def test_a_scaler_gets_the_times_of_these_and_earlier_sizes() -> None:
    got: list[Sizing] = []
    made = Scaling(name="mine:decide", scaler=lambda sizing: got.append(sizing) or {})  # type: ignore[func-returns-value]

    def told(step: int, sizes: Mapping[str, int]) -> Sizing:
        assert made.wanted(step, sizes, NONE_MORE) == []
        assert (got[-1].step, got[-1].sizes, got[-1].devices) == (step, sizes, NONE_MORE)
        return got.pop()

    nothing = Spent(steps=0, seconds=0.0, idle={})
    found = told(0, SIZES)
    assert (found.spent, found.earlier) == (nothing, ())
    others = {"roles.actor.ranks": 3, "rollout.replicas": 1}
    for seconds, idle in ((2.0, 0.5), (4.0, 1.0)):
        metrics = {"time/step": seconds, "idle/ranks/total": idle, "idle/ranks/samples": 0.25}
        made.step_done({**metrics, "time/train": 9.0, "reward": 1}, SIZES)
    found = told(2, SIZES)
    first = Spent(steps=2, seconds=3.0, idle={"idle/ranks/total": 0.75, "idle/ranks/samples": 0.25})
    assert (found.spent, found.earlier) == (first, ())
    found = told(2, others)  # somebody else has changed them since
    assert (found.spent, found.earlier) == (nothing, ((SIZES, first),))
    made.step_done({"time/step": 100.0, "idle/ranks/total": 90.0}, others)  # with the seconds of the change
    assert told(3, others).spent == nothing
    made.step_done({"time/step": 1.0, "idle/engines/total": 0.5}, others)
    found = told(4, others)
    second = Spent(steps=1, seconds=1.0, idle={"idle/engines/total": 0.5})
    assert (found.spent, found.earlier) == (second, ((SIZES, first),))
    told(4, SIZES)
    told(4, others)  # at once again
    for _ in range(2):
        made.step_done({"time/step": 8.0}, others)
    found = told(6, others)
    assert found.spent == Spent(steps=1, seconds=8.0, idle={})
    assert found.earlier == ((SIZES, first), (others, second), (SIZES, nothing))


def test_a_step_that_lost_a_machine_counts_for_no_sizes() -> None:
    got: list[Sizing] = []
    made = Scaling(name="mine:decide", scaler=lambda sizing: got.append(sizing) or {})  # type: ignore[func-returns-value]
    smaller, left = {**SIZES, "rollout.replicas": 1}, evolve(NONE_MORE, reserved=3)
    made.step_done({"time/step": 2.0}, SIZES)
    made.wanted(1, SIZES, NONE_MORE)
    made.step_done({"time/step": 70.0}, smaller)
    made.wanted(2, smaller, left)
    made.step_done({"time/step": 3.0}, smaller)
    made.wanted(3, smaller, left)
    before = Spent(steps=1, seconds=2.0, idle={})
    assert [(each.sizes, each.devices.reserved, each.spent.seconds, each.earlier) for each in got] == [
        (SIZES, 4, 2.0, ()),
        (smaller, 3, 0.0, ((SIZES, before),)),
        (smaller, 3, 3.0, ((SIZES, before),)),
    ]


def test_sizes_that_are_others_become_overrides() -> None:
    assert wanted(lambda _: {"rollout.replicas": 3}) == ["rollout.replicas=3"]
    both = {"roles.actor.ranks": 1, "rollout.replicas": np.int64(3)}
    assert wanted(lambda _: both) == ["roles.actor.ranks=1", "rollout.replicas=3"]
    assert wanted(lambda _: {"roles.actor.ranks": 2, "rollout.replicas": 2}) == []
    assert wanted(lambda _: {}) == []


NO_OTHER = "expected no other settings than roles.actor.ranks, rollout.replicas"
A_MAPPING = "expected a mapping of settings to numbers, {} to change nothing"


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, f"None, {A_MAPPING}"),
        ([("rollout.replicas", 3)], f"[('rollout.replicas', 3)], {A_MAPPING}"),
        ({"rollout.replicas": 2.0}, "{'rollout.replicas': 2.0}, expected an integer for rollout.replicas"),
        ({"rollout.replicas": True}, "{'rollout.replicas': True}, expected an integer for rollout.replicas"),
        ({"rollout.replica": 3}, f"{{'rollout.replica': 3}}, {NO_OTHER}"),
        ({1: 2}, f"{{1: 2}}, {NO_OTHER}"),
    ],
)
def test_what_is_no_sizes_is_one_line(returned: Any, said: str) -> None:
    with pytest.raises(CorerlError) as caught:
        wanted(lambda _: returned)
    assert caught.value.message == f"scaler: mine:decide returned {said}"


def test_an_error_of_the_function_is_one_line() -> None:
    def fails(sizing: Sizing) -> Mapping[str, int]:
        raise ValueError("no idea\nof what to do")

    with pytest.raises(CorerlError) as caught:
        wanted(fails)
    assert caught.value.message == "scaler: mine:decide failed: ValueError: no idea"
    with pytest.raises(CorerlError) as caught:
        wanted(balance, {"roles.actor.ranks": 2})  # nothing samples
    assert caught.value.message == "scaler: mine:decide failed: KeyError: 'rollout.replicas'"


# ---- balance ---------------------------------------------------------------------------------------------------------


def spent(seconds: float = 10.0, *, ranks: float = 0.0, engines: float = 0.0, steps: int = SETTLED) -> Spent:
    return Spent(steps=steps, seconds=seconds, idle={"idle/ranks/total": ranks, "idle/engines/total": engines})


def of(ranks: int, replicas: int) -> dict[str, int]:
    return {"roles.actor.ranks": ranks, "rollout.replicas": replicas}


def balanced(
    sizes: tuple[int, int], now: Spent, *earlier: tuple[tuple[int, int], Spent]
) -> tuple[int, int] | dict[str, int]:
    """(ranks, replicas) that `balance` wants, or {}."""
    before = [(of(*then), spent) for then, spent in earlier]
    found = balance(Sizing(step=9, sizes=of(*sizes), devices=NONE_MORE, spent=now, earlier=before))
    return (found["roles.actor.ranks"], found["rollout.replicas"]) if found else {}


def test_a_device_goes_to_the_side_that_is_waited_for() -> None:
    assert balanced((2, 2), spent(ranks=6.0, engines=1.0)) == (1, 3)
    assert balanced((2, 2), spent(ranks=1.0, engines=6.0)) == (3, 1)


def test_nothing_moves_for_a_small_difference_or_after_few_steps() -> None:
    assert balanced((2, 2), spent(ranks=4.0, engines=2.5)) == {}  # 15 % of a step
    assert balanced((2, 2), spent(ranks=2.5, engines=4.0)) == {}
    assert balanced((2, 2), spent(ranks=5.0, engines=2.5)) == (1, 3)
    assert balanced((2, 2), spent(ranks=9.0, steps=SETTLED - 1)) == {}
    assert balanced((2, 2), Spent(steps=9, seconds=10.0, idle={})) == {}


def test_more_devices_move_where_one_is_no_possible_size() -> None:
    def wanted(now: Spent, *refused: tuple[int, int], earlier: tuple[int, int] = (9, 9)) -> Mapping[str, int]:
        before = [(of(*earlier), spent(20.0))]
        sizing = Sizing(step=9, sizes=of(4, 4), devices=NONE_MORE, spent=now, earlier=before)
        return balance(evolve(sizing, refused=[of(*each) for each in refused]))

    samples, training = spent(ranks=6.0), spent(engines=6.0)
    assert wanted(samples, (3, 5)) == of(2, 6) and wanted(samples, (2, 6)) == of(3, 5)
    assert wanted(samples, (3, 5), earlier=(2, 6)) == {}  # where it comes from
    assert wanted(samples, (3, 5), (2, 6)) == of(1, 7) and wanted(samples, (3, 5), (2, 6), (1, 7)) == {}
    assert wanted(training, (5, 3), (3, 5)) == of(6, 2)
    assert wanted(training, (5, 3), (6, 2), (7, 1)) == {}


def test_balance_goes_back_if_steps_became_longer() -> None:
    before = ((3, 1), spent(8.0, ranks=6.0))
    assert balanced((2, 2), spent(9.0, ranks=6.0), before) == (3, 1)
    assert balanced((2, 2), spent(7.0, ranks=6.0), before) == (1, 3)
    assert balanced((2, 2), spent(9.0, ranks=6.0, steps=SETTLED - 1), before) == {}
    unsettled = ((3, 1), spent(8.0, ranks=6.0, steps=SETTLED - 1))
    assert balanced((2, 2), spent(9.0, ranks=6.0), unsettled) == (1, 3)


def test_balance_never_returns_to_lost_devices() -> None:
    with_all = ((4, 4), spent(8.0, ranks=6.0)), ((3, 5), spent(7.0, ranks=5.0))
    assert balanced((3, 2), spent(20.0, ranks=1.0), *with_all) == {}
    assert balanced((3, 2), spent(20.0, ranks=15.0), *with_all) == (2, 3)
    tried = (*with_all, ((3, 2), spent(20.0, ranks=15.0)))
    assert balanced((2, 3), spent(22.0, ranks=15.0), *tried) == (3, 2)  # as that has made steps longer
    assert balanced((2, 3), spent(18.0, ranks=15.0), *tried) == (1, 4)
    further = (*tried, ((2, 3), spent(18.0, ranks=15.0)), ((1, 4), spent(19.0)))
    assert balanced((2, 3), spent(18.0, ranks=15.0), *further) == {}


def courses() -> Iterator[tuple[str, Callable[[int, int, int], float], tuple[int, int]]]:
    """(name, seconds by (ranks, replicas, step), the sizes that 8 devices end with, from 4 and 4)."""
    work, samples = 12.0, 36.0
    yield "in turn", lambda ranks, replicas, step: max(work / ranks, samples / replicas), (2, 6)
    yield "longer and longer", lambda ranks, replicas, step: (1 + step / 9) * (3 + abs(ranks - 3)), (4, 4)


@pytest.mark.parametrize(("seconds", "ends"), [course[1:] for course in courses()], ids=[c[0] for c in courses()])
def test_a_run_comes_to_rest(seconds: Callable[[int, int, int], float], ends: tuple[int, int]) -> None:
    visited = course(of(4, 4), seconds)
    assert visited[-1] == ends and len(visited) <= 5


def course(sizes: dict[str, int], seconds: Callable[[int, int, int], float]) -> list[tuple[int, int]]:
    """(ranks, replicas) of a run that `balance` decides for, one after the other."""
    made = Scaling(name="balance", scaler=balance)
    visited = [(sizes["roles.actor.ranks"], sizes["rollout.replicas"])]
    for step in range(100):
        wanted = made.wanted(step, sizes, NONE_MORE)
        before = sizes
        sizes = sizes | {key: int(value) for key, value in (each.split("=") for each in wanted)}
        ranks, replicas = sizes["roles.actor.ranks"], sizes["rollout.replicas"]
        if sizes != before:
            visited.append((ranks, replicas))
        took = seconds(ranks, replicas, step)
        idle = {"idle/ranks/total": took - 12.0 / ranks, "idle/engines/total": took - 36.0 / replicas}
        made.step_done({"time/step": took, **idle}, sizes)
    return visited
