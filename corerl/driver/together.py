"""Wait for what several groups of processes do at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from attrs import frozen

Name = TypeVar("Name")

POLL_SECONDS = 0.1  # between looks at one group and at the next


class Group(Protocol):
    """What is asked of a group while it works; `corerl.cluster.ProcessGroup` is one."""

    def ready(self, pending: Any, timeout: float) -> bool: ...


@frozen
class Call:
    """Something that a group has been told to do."""

    group: Group
    pending: Any
    finish: Callable[[], Any]  # waits for it; its result, or its error


def together(calls: Mapping[Name, Call]) -> dict[Name, Any]:
    """The results by name. The first error of any group is raised at once: the others may be waiting for that one in
    vain, until a timeout. Of several calls of one group an earlier one ends before the next is looked at, so that the
    error is of the call that it happened in."""
    results: dict[Name, Any] = {}
    while len(results) < len(calls):
        busy: list[Group] = []
        for name, call in calls.items():
            if name in results or call.group in busy:
                continue
            alone = len(calls) - len(results) == 1
            if alone or call.group.ready(call.pending, POLL_SECONDS):
                results[name] = call.finish()
            else:
                busy.append(call.group)
    return {name: results[name] for name in calls}
