"""Calls that are under way in groups of processes, and how to wait for those of several groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from attrs import frozen

Name = TypeVar("Name")
T = TypeVar("T")

POLL_SECONDS = 0.1  # between looks at one group and at the next


class Waitable(Protocol):
    """What is asked of a group while it works; `corerl.cluster.group.RayGroup` is one."""

    def ready(self, pending: Any, timeout: float) -> bool: ...


@frozen(eq=False)
class Call(Generic[T]):
    """Something that a group has been told to do."""

    group: Waitable
    pending: Any
    wait: Callable[[], T]

    def ready(self, timeout: float) -> bool:
        """Whether `result` would return or raise at once, after at most `timeout` seconds."""
        return self.group.ready(self.pending, timeout)

    def result(self) -> T:
        """What came of it, once it is done; raises its error."""
        return self.wait()


def together(calls: Mapping[Name, Call[T]]) -> dict[Name, T]:
    """The results by name. The first error of any group is raised at once: the others may be waiting for that one in
    vain, until a timeout. Of several calls of one group an earlier one ends before the next is looked at, so that the
    error is of the call that it happened in."""
    results: dict[Name, T] = {}
    while len(results) < len(calls):
        busy: list[Waitable] = []
        for name, call in calls.items():
            if name in results or call.group in busy:
                continue
            alone = len(calls) - len(results) == 1
            if alone or call.ready(POLL_SECONDS):
                results[name] = call.result()
            else:
                busy.append(call.group)
    return {name: results[name] for name in calls}
