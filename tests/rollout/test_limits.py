from __future__ import annotations

import sys
import threading
import time

import pytest

from corerl.rollout.limits import TimeLimit, TooLong


def forever() -> None:
    while True:
        try:
            sum(range(100))
        except Exception:  # as a library may
            continue


def test_a_block_that_takes_too_long_is_ended_and_the_others_go_on() -> None:
    done = []
    with TimeLimit(0.2) as limit:
        for index in range(3):
            try:
                with limit.each():
                    if index == 1:
                        forever()
                    done.append(index)
            except TooLong:
                done.append(-index)
    assert done == [0, -1, 2]


def test_blocks_have_the_time_each_and_what_is_outside_of_them_has_no_limit() -> None:
    with TimeLimit(0.15) as limit:
        for _ in range(4):
            with limit.each():
                time.sleep(0.05)
        time.sleep(0.3)
    assert [thread for thread in threading.enumerate() if thread.name == "time limit"] == []


def test_what_a_destructor_swallows_is_raised_again_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    class Lasting:
        def __del__(self) -> None:
            began = time.monotonic()
            while time.monotonic() < began + 0.3:
                pass

    def destroy() -> None:
        Lasting()
        forever()

    with TimeLimit(0.1) as limit, pytest.raises(TooLong), limit.each():
        destroy()
    assert capsys.readouterr().err == ""


def test_limits_that_overlap_leave_nothing_behind() -> None:
    def watchers() -> int:
        return sum(thread.name == "time limit" for thread in threading.enumerate())

    first, second = TimeLimit(10.0), TimeLimit(10.0)
    with first:
        second.__enter__()
        assert watchers() == 0
        with first.each(), second.each():
            hook = sys.unraisablehook
            assert watchers() == 2
    assert watchers() == 1
    second.__exit__()
    assert watchers() == 0
    with TimeLimit(10.0) as third, third.each():
        assert sys.unraisablehook is hook


def test_an_error_of_the_block_is_its_own() -> None:
    with TimeLimit(10.0) as limit, pytest.raises(ZeroDivisionError), limit.each():
        _ = 1 / 0
