"""Represent calls in progress in groups of processes, and wait for calls of several groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from attrs import frozen

Name = TypeVar("Name")
T = TypeVar("T")

POLL_SECONDS = 0.1  # per group when polling several


class Waitable(Protocol):
    """A group whose calls can be polled, such as `corerl.cluster.group.RayGroup`."""

    def ready(self, pending: Any, timeout: float) -> bool: ...


@frozen(eq=False)
class Call(Generic[T]):
    """A call in progress in a group."""

    group: Waitable
    pending: Any
    wait: Callable[[], T]

    def ready(self, timeout: float) -> bool:
        """Whether `result` would return or raise at once; waits at most `timeout` seconds for that."""
        return self.group.ready(self.pending, timeout)

    def result(self) -> T:
        """Wait for the call; returns its result or raises its error."""
        return self.wait()


def together(calls: Mapping[Name, Call[T]], *, beside: Call[Any] | None = None) -> dict[Name, T]:
    """Wait for all calls; returns the results by name. The first error of any group is raised at once, since the other
    groups may be waiting for the failed one until a timeout. Calls of the same group are waited for in order, so that
    an error is attributed to the call it happened in. `beside` is not waited for, but its error is raised at once
    too."""
    results: dict[Name, T] = {}
    while len(results) < len(calls):
        if beside is not None and beside.ready(0.0):
            beside.result()
            beside = None
        busy: list[Waitable] = []
        for name, call in calls.items():
            if name in results or call.group in busy:
                continue
            alone = len(calls) - len(results) == 1 and beside is None
            if alone or call.ready(POLL_SECONDS):
                results[name] = call.result()
            else:
                busy.append(call.group)
    return {name: results[name] for name in calls}
