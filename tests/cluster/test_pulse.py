"""Who is ended, of processes whose answers are made up."""

import math

import pytest
from attrs import evolve

from corerl.cluster.pulse import LOOKS, Bounds, Pulse
from corerl.cluster.watchdog import Status

COLLECTIVE = Status(phase="load", place="loading.py:3 in load", waits=True, collectives={"world": 2})
BUILDING = Status(phase="model build", place="model.py:7 in build", collectives={"world": 1})


def starting(status: Status | None, looks: int) -> Pulse:
    return Pulse(actor=None, status=status, starting=looks)


def test_the_shorter_bound_says_how_often_to_look_and_without_one_nobody_looks() -> None:
    assert Bounds(silence=16.0, start=800.0).period == Bounds(silence=16.0).period == Bounds(start=16.0).period == 2.0
    assert Bounds().period == math.inf


def test_one_is_silent_once_as_many_looks_found_no_answer_as_fill_the_bound() -> None:
    bounds, pulses = Bounds(silence=16.0), {0: Pulse(actor=None, missed=LOOKS - 1), 4: Pulse(actor=None, missed=LOOKS)}
    assert bounds.silent(pulses) == [4]
    assert evolve(bounds, silence=0.0, start=16.0).silent(pulses) == []


@pytest.mark.parametrize(
    ("statuses", "ended"),
    [
        ([COLLECTIVE, BUILDING, COLLECTIVE], [1]),  # the one that the others wait for
        ([COLLECTIVE, None, COLLECTIVE], [1]),
        ([BUILDING, BUILDING], [0, 1]),  # nobody waits
    ],
)
def test_of_those_that_have_worked_on_their_start_for_too_long_the_awaited_one_is_ended(
    statuses: list[Status | None], ended: list[int]
) -> None:
    bounds = Bounds(silence=16.0, start=48.0)
    pulses = {member: starting(status, 3 * LOOKS) for member, status in enumerate(statuses)}
    assert bounds.overdue(pulses) == ended
    assert evolve(bounds, start=49.0).overdue(pulses) == []


def test_one_that_waits_for_another_is_not_ended_before_it_nor_after_it() -> None:
    bounds = Bounds(silence=16.0, start=48.0)
    waits = starting(COLLECTIVE, 3 * LOOKS)
    assert bounds.overdue({0: waits, 1: starting(BUILDING, 3 * LOOKS - 1)}) == []
    assert bounds.overdue({0: waits, 1: starting(BUILDING, 3 * LOOKS)}) == [1]
    assert bounds.overdue({0: waits}) == []


def test_one_that_answers_without_a_phase_has_started() -> None:
    pulse = starting(BUILDING, 1)
    pulse.heard(BUILDING)
    assert not pulse.started
    pulse.missed = 3
    pulse.heard(Status())
    assert (pulse.started, pulse.missed, pulse.status) == (True, 0, Status())
