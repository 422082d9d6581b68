from __future__ import annotations

from typing import Any

import pytest

from corerl.calls import Call, together
from corerl.errors import WorkerDied


class Group:
    """Is ready after it was looked at `looks` times; never, where that is negative."""

    def __init__(self, looks: int = 0) -> None:
        self.looks = looks

    def ready(self, pending: Any, timeout: float) -> bool:
        self.looks -= 1
        return self.looks == -1


def died() -> None:
    raise WorkerDied("its process died")


def test_results_come_in_the_order_of_the_calls_whoever_is_ready_first() -> None:
    calls = {name: Call(Group(looks), None, lambda name=name: name.upper()) for name, looks in (("a", 3), ("b", 0))}
    assert list(together(calls).items()) == [("a", "A"), ("b", "B")]


def test_the_first_error_is_raised_while_others_would_wait_for_ever() -> None:
    calls = {"hangs": Call(Group(-5), None, lambda: "never"), "dies": Call(Group(1), None, died)}
    with pytest.raises(WorkerDied, match="^its process died$"):
        together(calls)


def test_an_error_is_of_the_earliest_call_that_has_it() -> None:
    group = Group(3)

    def failing(step: int) -> Call[None]:
        def wait() -> None:
            raise WorkerDied(f"its process died in step {step}")

        return Call(group, None, wait)

    with pytest.raises(WorkerDied, match="^its process died in step 0$"):
        together({step: failing(step) for step in range(3)})


def test_an_error_beside_the_calls_is_raised_at_once_and_a_result_is_not_waited_for() -> None:
    hangs = {"hangs": Call(Group(-5), None, lambda: "never")}
    with pytest.raises(WorkerDied, match="^its process died$"):
        together(hangs, beside=Call(Group(3), None, died))
    calls = {name: Call(Group(looks), None, lambda name=name: name.upper()) for name, looks in (("a", 2), ("b", 0))}
    assert together(calls, beside=Call(Group(-5), None, died)) == {"a": "A", "b": "B"}
    asked: list[int] = []
    assert together({"a": Call(Group(5), None, lambda: "A")}, beside=Call(Group(1), None, lambda: asked.append(1)))
    assert asked == [1]


def test_a_call_that_is_alone_is_waited_for_without_looking() -> None:
    group = Group(-5)
    assert together({"one": Call(group, None, lambda: 1)}) == {"one": 1}
    assert group.looks == -5
    assert together({}) == {}
