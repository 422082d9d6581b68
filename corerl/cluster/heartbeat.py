"""Heartbeats: processes report where they are; the driver ends those that hang and says whom a long call waits for.

A process answers in a thread of its own. The driver asks every few seconds and counts what is missing instead of
timing it, so that nobody is late because the driver itself was stopped.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import ray
from attrs import define, field, frozen
from ray.exceptions import RayError

from corerl.config.schema import ClusterConfig
from corerl.messages import note, one_line
from corerl.plugin.events import Span

BEAT_SECONDS = 2.0  # between two heartbeats
SILENT_SECONDS = 5.0  # without a heartbeat, after which a process is called silent
BEATS = 8  # heartbeats, at least, within the shortest time limit
SAMPLE_SECONDS = 0.005  # between checks whether a traced call waits in a collective
SILENCE = "SIGSTOP, debugger, swapping, or native code holding the GIL"
DESCRIBED = 8  # maximum number of processes described; the others are counted
ASIDE = "aside"  # the concurrency group that answers while all other threads are busy

LIBRARIES = re.compile(
    r"[/\\]site-packages[/\\](torch|ray)[/\\]|^<|[/\\]corerl[/\\]cluster[/\\](process|heartbeat)\.py$"
)
COLLECTIVES = re.compile(r"[/\\]torch[/\\]distributed[/\\](distributed_c10d|_functional_collectives)\.py$")


# ---- in the process --------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Heartbeat:
    """Where a process is; of several calls at once, where the oldest is."""

    pid: int = 0
    phase: str = ""  # of startup, such as 'model build'; "" once it has started
    place: str = ""  # its innermost line of Python outside torch and Ray
    waits: bool = False  # inside a torch.distributed collective
    moved: bool = True  # its stack or its collectives are others than at the last heartbeat
    collectives: Mapping[str, int] = field(factory=dict)  # process group -> collectives started
    calls: Mapping[int, float] = field(factory=dict)  # number of each call in progress -> seconds so far
    counts: Mapping[int, tuple[int, int]] = field(factory=dict)  # number -> parts, such as samples: done, all


@define(eq=False)
class CallRecord:
    """One call in progress."""

    number: int
    lane: int  # the lowest one not used by another call of the process
    started: float
    spans: list[Span] = field(factory=list)  # in ending order
    waits: list[Span] = field(factory=list)
    _seen: tuple[int, str, float] | None = None  # frame id, name and start of the collective it was last seen in

    def sample(self, frame: FrameType | None, now: float) -> None:
        """A collective counts from the sample that first sees it until one that sees something else."""
        found = collective_in(frame)
        if self._seen is not None and (found is None or found[0] != self._seen[0]):
            self.waits.append(Span(name=self._seen[1], started=self._seen[2], ended=now))
            self._seen = None
        if found is not None and self._seen is None:
            self._seen = (*found, now)


class Recorder:
    """The calls of a process. `with recorder("gather"): ...` records a block as a span of its thread's call; outside a
    call, or in a thread that a call started, nothing is recorded. If `traced`, waits in collectives are sampled."""

    def __init__(self, *, traced: bool = False, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self._traced = traced
        self._calls: dict[int, CallRecord] = {}  # by thread, oldest first
        self._changing = threading.Lock()
        self._working = threading.Event()  # set while there is a call
        self._sampling: threading.Thread | None = None
        self._position: tuple[int, dict[str, int]] = (0, {})  # stack and collectives at the last heartbeat

    def start(self, number: int) -> None:
        """Note that a call starts in this thread."""
        with self._changing:
            taken = {call.lane for call in self._calls.values()}
            lane = next(lane for lane in range(len(taken) + 1) if lane not in taken)
            self._calls[threading.get_ident()] = CallRecord(number, lane, self.clock())
            self._working.set()
            if self._traced and self._sampling is None:
                self._sampling = threading.Thread(target=self._sample, name="corerl-collectives", daemon=True)
                self._sampling.start()

    def end(self) -> tuple[CallRecord, float]:
        """End this thread's call; returns its record, with outer spans before the spans inside them, and the time."""
        with self._changing:
            ended = self.clock()
            call = self._calls.pop(threading.get_ident())
            call.sample(None, ended)
            if not self._calls:
                self._working.clear()
        call.spans.reverse()
        call.spans.sort(key=lambda span: (span.started, -span.ended))
        return call, ended

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = self.clock()
        try:
            yield
        finally:
            call = self._calls.get(threading.get_ident())
            if call is not None and call.started <= started:  # otherwise left over from an earlier call
                call.spans.append(Span(name=name, started=started, ended=self.clock()))

    def heartbeat(self, phase: str, counts: Mapping[int, tuple[int, int]]) -> Heartbeat:
        """`counts` are by thread."""
        with self._changing:
            calls = dict(self._calls)
            now = self.clock()
        frame = frame_of(next(iter(calls), 0))
        place, waits, stack = where(frame) if frame is not None else ("", False, 0)
        before, self._position = self._position, (stack, collectives_started())
        return Heartbeat(
            pid=os.getpid(),
            phase=phase,
            place=place,
            waits=waits,
            moved=self._position != before,
            collectives=self._position[1],
            calls={call.number: now - call.started for call in calls.values()},
            counts={call.number: counts[thread] for thread, call in calls.items() if thread in counts},
        )

    def _sample(self) -> None:
        while self._working.wait():
            with self._changing:
                for thread, call in self._calls.items():
                    call.sample(frame_of(thread), self.clock())
            time.sleep(SAMPLE_SECONDS)


def frame_of(thread: int) -> FrameType | None:
    """The current innermost frame of a thread of this process."""
    return sys._current_frames().get(thread)


def where(frame: FrameType) -> tuple[str, bool, int]:
    """`Heartbeat.place` and `waits` of a thread with this innermost frame, and a hash of its stack."""
    frames: list[FrameType] = [frame]
    while frames[-1].f_back is not None:
        frames.append(frames[-1].f_back)
    place = ""
    if (own := next((each for each in frames if not LIBRARIES.search(each.f_code.co_filename)), None)) is not None:
        tail = "/".join(re.split(r"[/\\]", own.f_code.co_filename)[-2:])
        place = f"{tail}:{own.f_lineno} in {own.f_code.co_name}"
    return place, collective_in(frame) is not None, hash(tuple((id(each.f_code), each.f_lasti) for each in frames))


def collective_in(frame: FrameType | None) -> tuple[int, str] | None:
    """(frame id, name) of the torch.distributed collective that a thread with this innermost frame is in, or None."""
    while frame is not None and LIBRARIES.search(frame.f_code.co_filename):
        if COLLECTIVES.search(frame.f_code.co_filename):
            return id(frame), frame.f_code.co_name
        frame = frame.f_back
    return None


def collectives_started() -> dict[str, int]:
    """Process group (name and ranks) -> collectives started in it by this process. May be called from another thread
    during a collective. torch has no public names for this."""
    dist = sys.modules.get("torch.distributed")  # not imported here: engines may do without torch
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if dist is None or c10d is None or not dist.is_initialized():
        return {}
    started = {}
    for group, name in list(c10d._world.pg_names.items()):
        ranks = c10d._world.pg_group_ranks.get(group)  # missing while a group is being made
        if ranks is not None:
            # gloo for host memory, NCCL for device memory; a backend that serves both is counted once.
            backends: set[Any] = {group._get_backend(device) for device in group._device_types}
            started[f"{name} {sorted(ranks)}"] = sum(backend._get_sequence_number_for_group() for backend in backends)
    return started


# ---- in the driver ---------------------------------------------------------------------------------------------------


@define(eq=False)
class Member:
    """What the driver knows of one process."""

    name: str
    actor: Any = None
    patience: int = 3  # missing heartbeats after which it is silent
    started: bool = False  # its object exists, and has no phase of startup any more
    last: Heartbeat | None = None
    missed: int = 0  # heartbeats in a row
    starting: int = 0  # heartbeats that found it busy starting
    killed: str = ""  # why it was ended here, if it was
    _asked: Any = None  # reference to the answer

    @property
    def silent(self) -> bool:
        return self.missed >= self.patience

    @property
    def beat(self) -> Heartbeat | None:
        """The last heartbeat; None if the process is silent, or none has come."""
        return None if self.silent else self.last

    def poll(self) -> None:
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            with contextlib.suppress(RayError):  # it has ended, which its calls report
                self.receive(ray.get(self._asked))
            self._asked = None
        elif self._asked is not None:
            self.missed += 1
        if not self.started and (self.beat is None or self.beat.place):
            self.starting += 1
        if self._asked is None:
            self._asked = self.actor.heartbeat.options(concurrency_group=ASIDE).remote()

    def receive(self, beat: Heartbeat) -> None:
        self.last, self.missed = beat, 0
        self.started = self.started or not beat.phase

    def note_started(self) -> None:
        """Its object exists, as one of its results says. Until now imports and loading may have held the GIL for long:
        heartbeats that were missed meanwhile do not count."""
        if not self.started:
            self.started, self.missed = True, 0

    def kill(self, why: str) -> None:
        self.killed = why
        ray.kill(self.actor, no_restart=True)


@define(eq=False)
class Pending:
    """Calls in progress; `RayGroup.wait` returns their results."""

    method: str  # with its step, if it has one: "train at optimizer step 12"
    number: int  # of the call in its group
    members: Mapping[int, Member]  # that were called; they may be replaced since, or gone from the group
    refs: tuple[Any, ...]  # in the same order
    asked: float = field(factory=time.time)  # time.time() before the calls started
    reported: set[int] = field(factory=set)  # members whose answers were passed to `on_answer`
    due: float = 0.0  # seconds at which the watchdog speaks; 0: for the first time
    done: dict[int, int] = field(factory=dict)  # parts of each member's call that had ended at the last check

    @property
    def by_ref(self) -> dict[Any, int]:
        """Reference -> the member whose answer it is."""
        return dict(zip(self.refs, self.members, strict=True))


@frozen(kw_only=True)
class Watching:
    """What a group does about its calls. Seconds of 0 switch that off."""

    notify: Callable[[str], None] | None = None  # gets a sentence on who is late; called in another thread
    watchdog: float = 0.0  # seconds after which that happens if nothing moves, then after twice as long, etc.
    health_timeout: float = 0.0  # without a heartbeat, after which a process that has started is ended
    start_timeout: float = 0.0  # of work until it has started, after which it is ended
    # Called once per answer (name, calls, result); if set, the processes record what they do in their calls.
    on_answer: Callable[[str, Pending, Any], None] | None = None

    @classmethod
    def of(
        cls,
        cluster: ClusterConfig,
        notify: Callable[[str], None],
        on_answer: Callable[[str, Pending, Any], None] | None = None,
    ) -> Watching:
        return cls(
            notify=notify,
            watchdog=cluster.watchdog,
            health_timeout=cluster.health_timeout,
            start_timeout=cluster.start_timeout,
            on_answer=on_answer,
        )

    @property
    def period(self) -> float:
        """Seconds between two heartbeats."""
        limits = [limit / BEATS for limit in (self.watchdog, self.health_timeout, self.start_timeout) if limit]
        return min([BEAT_SECONDS, *limits])

    @property
    def patience(self) -> int:
        """Missing heartbeats after which a process is silent."""
        return math.ceil(SILENT_SECONDS / self.period)


class Heartbeats:
    """The heartbeats of a group's processes, until `stop` or the end of Ray."""

    def __init__(self, watching: Watching, members: Sequence[Member]) -> None:
        """`members` may change while `lock` is held."""
        self.lock = threading.Lock()  # nobody is asked or ended once the group has ended, and Ray may have
        self._watching, self._members = watching, members
        self._calls: deque[weakref.ref[Pending]] = deque()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    def watch(self, call: Pending) -> None:
        self._calls.append(weakref.ref(call))

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._watching.period):
            with self.lock:
                if self._stopped.is_set() or not ray.is_initialized():  # it would be started by a call
                    return
                for member in self._members:
                    if not member.killed:
                        member.poll()
                end_hung(self._members, self._watching)
                texts = list(self._late_calls())
            for text in texts:
                self._notify(text)

    def _notify(self, text: str) -> None:
        assert self._watching.notify is not None
        try:
            self._watching.notify(text)
        except Exception as error:  # of the user's function: hung processes must still be noticed
            note(f"{text} (and notify raised {one_line(error)})")

    def _late_calls(self) -> Iterator[str]:
        for _ in range(len(self._calls)):
            reference = self._calls.popleft()
            call = reference()
            if call is None:
                continue
            ended, running = ray.wait(list(call.refs), num_returns=len(call.refs), timeout=0)
            if running:
                self._calls.append(reference)
                if self._watching.notify is not None and self._watching.watchdog:
                    waiting = [member for ref, member in call.by_ref.items() if ref not in ended]
                    yield from late_call(call, waiting, self._watching.watchdog)


def end_hung(members: Sequence[Member], watching: Watching) -> None:
    """End processes that are silent, or have worked on their start for too long: whoever waits for them gets an error
    that names them. A process that only waits for another in its start is not ended before that one."""

    def over(beats: int, limit: float) -> bool:
        return 0 < limit <= beats * watching.period

    living = [member for member in members if not member.killed]
    hung = [member for member in living if member.started and over(member.missed, watching.health_timeout)]
    for member in hung:
        member.kill(f"no heartbeat for {watching.health_timeout:g} s (cluster.health_timeout): {SILENCE}")
    starting = [member for member in living if not member.started]
    awaited = late(starting)
    for member in starting:
        waits = member not in awaited if awaited else member.beat is not None and member.beat.waits
        if over(member.starting, watching.start_timeout) and not waits:
            limit = f"{watching.start_timeout:g} s of work (cluster.start_timeout)"
            member.kill(f"not started after {limit}: {described(member)}")


def late_call(call: Pending, waiting: Sequence[int], watchdog: float) -> Iterator[str]:
    """A sentence if it is time for one and nothing moves. A call that counts its parts may move and still end none."""
    members = [call.members[member] for member in waiting]
    beats = [member.beat for member in members]
    running = [beat.calls.get(call.number, 0.0) for beat in beats if beat is not None]
    seconds = max(running, default=time.time() - call.asked)
    if seconds < (call.due or watchdog):
        return
    call.due = 2 * seconds
    counts = counts_of(call, waiting)
    if counts:
        stuck = all(done <= call.done.get(member, 0) for member, (done, _) in counts.items())
        call.done = {member: done for member, (done, _) in counts.items()}
    else:
        stuck = any(beat is None or beat.phase for beat in beats) or not any(beat.moved for beat in beats if beat)
    if stuck:
        done = [member for index, member in call.members.items() if index not in waiting]
        of_members = {call.members[member]: count for member, count in counts.items()}
        yield sentence(call.method, seconds, members, done, of_members)


def counts_of(call: Pending, members: Sequence[int]) -> dict[int, tuple[int, int]]:
    """How many parts of each member's call have ended, of how many; without members that do not report it."""
    beats = {member: call.members[member].beat for member in members}
    return {
        member: beat.counts[call.number]
        for member, beat in beats.items()
        if beat is not None and call.number in beat.counts
    }


def late(members: Sequence[Member]) -> list[Member]:
    """The members that the others wait for, and silent ones; empty if that is unclear.

    A rank that has started fewer collectives of a group than another rank of it is behind; one that has started more is
    ahead. Some ranks that are behind are themselves waiting, in a smaller group, for one that is further behind.
    """
    known = [(member, member.beat) for member in members if member.beat is not None]
    started: dict[str, list[int]] = {}
    for _, beat in known:
        for group, count in beat.collectives.items():
            started.setdefault(group, []).append(count)

    def behind(beat: Heartbeat) -> bool:
        return any(count < max(started[group]) for group, count in beat.collectives.items())

    def ahead(beat: Heartbeat) -> bool:
        return any(count > min(started[group]) for group, count in beat.collectives.items())

    waiting = any(beat.waits for _, beat in known)
    for rule in (
        lambda beat: behind(beat) and not ahead(beat) and not beat.waits,
        lambda beat: waiting and not beat.waits and not ahead(beat),
        lambda beat: behind(beat) and not ahead(beat),
    ):
        found = [member for member, beat in known if rule(beat)]
        if found:
            return [member for member in members if member in found or member.beat is None]
    return [member for member in members if member.beat is None]


def sentence(
    method: str,
    seconds: float,
    waiting: Sequence[Member],
    done: Sequence[Member] = (),
    counts: Mapping[Member, tuple[int, int]] | None = None,
) -> str:
    """The message about a call that the members `done` have answered and those `waiting` have not."""
    culprits = late(waiting)
    blocked = [member for member in waiting if member not in culprits] if culprits else []
    shown = culprits or list(waiting)
    parts = [described(member, (counts or {}).get(member)) for member in shown[:DESCRIBED]]
    if len(shown) > DESCRIBED:
        parts.append(f"{len(shown) - DESCRIBED} more, not listed")
    if blocked:
        phases = dict.fromkeys(m.beat.phase for m in blocked if m.beat is not None and m.beat.phase)
        in_phase = f" in {' and '.join(map(repr, phases))}" if phases else ""
        verb, pronoun = "is waiting" if len(blocked) == 1 else "are waiting", "it" if len(culprits) == 1 else "them"
        parts.append(f"{listed(blocked)} {verb} for {pronoun}{in_phase}")
    if done:
        parts.append(f"{listed(done)} {'is' if len(done) == 1 else 'are'} done")
    return f"{method} has taken {seconds:.0f} s: {'; '.join(parts)}"


def listed(members: Sequence[Member]) -> str:
    """Join names; rank names are compressed, such as 'actor ranks 0-2, 5'."""
    names = [member.name for member in members]
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


def described(member: Member, count: tuple[int, int] | None = None) -> str:
    """Where a process is, in a clause."""
    beat = member.beat
    if member.last is None:
        return f"{member.name} has not sent a heartbeat yet: its process is starting"
    if beat is None:
        return f"{member.name} (pid {member.last.pid}) sends no heartbeat: {SILENCE}"
    place = f" ({beat.place})" if beat.place else ""
    if beat.phase:
        return f"{member.name} is in {beat.phase!r}{place}"
    progress = f", with {count[0]} of {count[1]} samples done" if count is not None else ""
    return f"{member.name} {'is waiting in a collective' if beat.waits else 'is at work'}{place}{progress}"
