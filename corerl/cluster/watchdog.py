"""Find out which process a long call waits for, and word the sentence that tells the user."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from types import FrameType

from attrs import define, field, frozen

SETTLE_SECONDS = 2.0  # between two checks: a process at the same place, with no new collective, is stuck
ANSWER_SECONDS = 5.0  # for a process to report its status
DESCRIBED = 8  # maximum number of processes described; the others are counted

LIBRARIES = re.compile(r"[/\\]site-packages[/\\](torch|ray)[/\\]|^<|[/\\]corerl[/\\]cluster[/\\]process\.py$")
COLLECTIVES = re.compile(r"[/\\]torch[/\\]distributed[/\\](distributed_c10d|_functional_collectives)\.py$")


@frozen(kw_only=True)
class Status:
    """A process's own report of where its current call is."""

    phase: str = ""  # of startup, such as 'model build'; "" afterwards
    hook: str = ""  # the plugins' method that it is in, if it is in one
    place: str = ""  # its innermost line of Python outside torch and Ray
    waits: bool = False  # inside a torch.distributed collective
    collectives: Mapping[str, int] = field(factory=dict)  # process group -> collectives begun
    stack: int = 0  # a hash of the stack: changes when the process moves
    # Of each call, by Ray's id of it, that tells how far it is: how many of its parts, such as samples, have ended, and
    # how many it has.
    counts: Mapping[str, tuple[int, int]] = field(factory=dict)

    def moved(self, before: Status) -> bool:
        return (self.stack, self.collectives) != (before.stack, before.collectives)


@define
class Watch:
    """When to check one call's processes, and what the last check saw."""

    started: float = field(factory=time.monotonic)
    due: float | None = None  # seconds after the start; None before the first check
    seen: dict[int, Status | None] | None = None  # statuses at the first check of a pair
    ended: dict[int, int] = field(factory=dict)  # parts of each member's call that had ended at the last pair

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def stand(frame: FrameType) -> tuple[str, bool, int]:
    """`Status.place`, `waits` and `stack` of a thread with this innermost frame."""
    place, waits, positions = "", False, []
    current: FrameType | None = frame
    while current is not None:
        file = current.f_code.co_filename
        positions.append((id(current.f_code), current.f_lasti))
        if not place:
            waits = waits or bool(COLLECTIVES.search(file))
            if not LIBRARIES.search(file):
                tail = "/".join(re.split(r"[/\\]", file)[-2:])
                place = f"{tail}:{current.f_lineno} in {current.f_code.co_name}"
        current = current.f_back
    return place, waits, hash(tuple(positions))


def frame_of(thread: int) -> FrameType | None:
    """The current innermost frame of a thread of this process."""
    return sys._current_frames().get(thread)


def late(statuses: Mapping[int, Status | None]) -> list[int]:
    """The members that the others wait for; empty if that is unclear. A status of None means no answer.

    A rank that has begun fewer collectives of a group than another rank of it is behind; one that has begun more is
    ahead. Some ranks that are behind are themselves waiting, in a smaller group, for one that is further behind.
    """
    known = {member: status for member, status in statuses.items() if status is not None}
    silent = [member for member in statuses if member not in known]
    begun: dict[str, list[int]] = {}
    for status in known.values():
        for group, count in status.collectives.items():
            begun.setdefault(group, []).append(count)

    def behind(status: Status) -> bool:
        return any(count < max(begun[group]) for group, count in status.collectives.items())

    def ahead(status: Status) -> bool:
        return any(count > min(begun[group]) for group, count in status.collectives.items())

    waiting = [status for status in known.values() if status.waits]
    for rule in (
        lambda status: behind(status) and not ahead(status) and not status.waits,
        lambda status: behind(status) and not status.waits,
        lambda status: bool(waiting) and not status.waits and not ahead(status),
        lambda status: behind(status) and not ahead(status),
    ):
        found = [member for member, status in known.items() if rule(status)]
        if found:
            return sorted({*found, *silent})
    return sorted(silent)


def sentence(
    names: Sequence[str] | Mapping[int, str],
    method: str,
    seconds: float,
    statuses: Mapping[int, Status | None],
    done: Collection[int],
    counts: Mapping[int, tuple[int, int]] | None = None,
) -> str:
    """Word the message about a call that the members in `done` have answered and those in `statuses` have not. `counts`
    says how many parts of a member's call have ended, and how many it has."""
    culprits = late(statuses)
    waiting = [member for member in statuses if member not in culprits] if culprits else []
    shown = culprits or sorted(statuses)
    parts = [described(names[member], statuses[member], (counts or {}).get(member)) for member in shown[:DESCRIBED]]
    if len(shown) > DESCRIBED:
        parts.append(f"{len(shown) - DESCRIBED} more, not listed")
    if waiting:
        phases = dict.fromkeys(status.phase for m in waiting if (status := statuses[m]) is not None and status.phase)
        where = f" in {' and '.join(map(repr, phases))}" if phases else ""
        verb, pronoun = "is waiting" if len(waiting) == 1 else "are waiting", "it" if len(culprits) == 1 else "them"
        parts.append(f"{listed([names[m] for m in waiting])} {verb} for {pronoun}{where}")
    if done:
        parts.append(f"{listed([names[m] for m in sorted(done)])} {'is' if len(done) == 1 else 'are'} done")
    return f"{method} has taken {seconds:.0f} s: {'; '.join(parts)}"


def listed(names: Sequence[str]) -> str:
    """Join names; rank names are compressed, such as 'actor ranks 0-2, 5'."""
    matches = [re.fullmatch(r"(.* rank) (\d+)", name) for name in names]
    heads = {match[1] for match in matches if match}
    if len(names) < 2 or not all(matches) or len(heads) > 1:
        return ", ".join(names)
    ranges: list[list[int]] = []
    for number in sorted(int(match[2]) for match in matches if match):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return f"{heads.pop()}s {', '.join('-'.join(map(str, each)) for each in ranges)}"


def described(name: str, status: Status | None, count: tuple[int, int] | None = None) -> str:
    """Where a process is, in a clause."""
    if status is None:
        return f"{name} does not report where it is: it has not started yet, or native code is holding Python's GIL"
    place = f" ({status.place})" if status.place else ""
    if status.phase:
        return f"{name} is in {status.phase!r}{place}"
    how_far = f", with {count[0]} of {count[1]} samples done" if count is not None else ""
    return f"{name} {'is waiting in a collective' if status.waits else 'is at work'}{place}{how_far}"
