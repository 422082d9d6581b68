"""Call processes that work together, singly or all at once; if one fails, end all and raise *its* error."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from attrs import field, frozen
from ray.exceptions import RayError

from corerl.cluster import services
from corerl.cluster.failures import LONGEST, death, overdue, silent
from corerl.cluster.placement import Slot
from corerl.cluster.process import STATUS, Outcome, spawn
from corerl.cluster.pulse import Bounds, Pulse
from corerl.cluster.watchdog import ANSWER_SECONDS, SETTLE_SECONDS, Status, Watch, sentence
from corerl.errors import CorerlError, HookFailed, WorkerDied
from corerl.messages import last_line, shorten

# After a first failure the others get this long to fail too, to tell the cause from its consequences: a rank whose
# neighbor vanished reports a broken connection, possibly before the neighbor's death is noticed.
GRACE_SECONDS = 3.0

CallCounts = Callable[[Mapping[int, int | None]], None]  # called with parts that have ended, by member

COUNT_SECONDS = 2.0  # between two looks at how far a call is
COUNTED_WITHIN = 0.5  # seconds for a process to say; meanwhile its answer is not noticed


@frozen(eq=False)
class Pending:
    """Calls in progress; `RayGroup.wait` returns their results."""

    method: str
    members: tuple[int, ...]
    refs: tuple[Any, ...]
    watch: Watch = field(factory=Watch)
    asked: float = field(factory=time.time)  # time.time() before the calls started
    told: set[int] = field(factory=set)  # members whose answers were passed to `on_answer`
    # Of the processes that were called; they may be replaced since, or gone from the group:
    names: Mapping[int, str] = field(factory=dict)
    pulses: Mapping[int, Pulse] = field(factory=dict)


@frozen(kw_only=True)
class Watching:
    """Callbacks about a group's calls while someone waits for them."""

    # Gets a sentence on who is late, and where, when a call has taken `seconds` (0: never), then twice as long, etc.
    notify: Callable[[str], None] | None = None
    seconds: float = 0.0
    bounds: Bounds = field(factory=Bounds)  # after which processes are ended
    # Called once per answer, with the member's name; if set, the processes record what they do in their calls.
    on_answer: Callable[[str, Pending, Outcome], None] | None = None


class RayGroup:
    """Processes of the same class, with names such as `actor rank 0`."""

    def __init__(
        self,
        names: Sequence[str],
        target: str,
        slots: Sequence[Slot],
        environment: Mapping[str, str],
        *,
        failure: type[CorerlError] = HookFailed,
        threads: int = 1,
        watching: Watching | None = None,
    ) -> None:
        """`failure` is the type that foreign exceptions of the processes become. With one thread, calls run in the
        order they were started; with more, that many run at once."""
        _require_seats(names, slots)
        self.names = list(names)
        self.target = target
        self._environment = dict(environment)
        self._slots = list(slots)
        self._failure = failure
        self._threads = threads
        self._watching = watching or Watching()
        self._actors = [self._spawn(member) for member in range(len(names))]
        self._alive = True
        self._cause = ""  # the error that has ended the group, in a line
        self._answered = 0.0  # time.monotonic() when all members had answered the last awaited call
        self._pulses = [Pulse(actor=actor) for actor in self._actors]
        self._ended = threading.Event()
        self._feeling = threading.Lock()  # held while the pulse is felt: not once the group has ended, and Ray may have
        if self._watching.bounds.period < math.inf:
            threading.Thread(target=self._feel_pulse, name="pulse", daemon=True).start()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def nodes(self) -> list[str]:
        """Ray's id of each member's machine."""
        return [slot.node for slot in self._slots]

    @property
    def ended(self) -> bool:
        """Whether the group was killed, by its owner or because a member failed."""
        return not self._alive

    # ---- calls ------------------------------------------------------------------------------------------------------

    def construct(self, arguments: Sequence[tuple[Any, ...]]) -> Pending:
        """Construct each process's object, each with its own arguments."""
        self._check_lengths("start", arguments)
        asked = time.time()
        refs = [actor.construct.remote(*args) for actor, args in zip(self._actors, arguments, strict=True)]
        return self._pending("start", range(len(self)), refs, asked)

    def listen(self, member: int) -> tuple[str, int, int]:
        """Open a listening socket in the member's process, as `Process.listen`; returns (host, port, file descriptor
        there)."""
        asked = time.time()
        ref = self._actors[member].listen.remote()
        address: tuple[str, int, int] = self.wait(self._pending("listen", [member], [ref], asked))[0]
        return address

    def start(self, method: str, *args: Any) -> Pending:
        """Call `method` in all processes with the same arguments. Ray resolves object references among `args` there."""
        return self.start_each(method, [args] * len(self))

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Pending:
        """Call `method` in all processes, each with its own arguments."""
        self._check_lengths(method, arguments)
        return self.start_some(method, dict(enumerate(arguments)))

    def start_some(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Pending:
        """Call `method` only in the members that `arguments` names."""
        self._require_alive(method)
        asked = time.time()
        with services.unbroken():  # a member that has the call may wait for the others in it
            refs = [self._actors[member].call.remote(method, *args) for member, args in arguments.items()]
        return self._pending(method, arguments, refs, asked)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.wait(self.start(method, *args))

    def wait(self, pending: Pending) -> list[Any]:
        """Results in the members' order. The first failure ends the whole group and is raised; but if all members
        answered and every failure was a mere refusal (`CorerlError.harmless`), the group lives on."""
        outcomes: dict[int, Outcome] = {}
        waiting = dict(zip(pending.refs, pending.members, strict=True))
        deadline: float | None = None
        while waiting:
            if deadline is None:
                timeout = self._look(pending, waiting.values())
            else:
                timeout = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout)
            if not ready and deadline is not None:
                break
            for ref in ready:
                member = waiting.pop(ref)
                outcomes[member] = self._outcome(ref, member, pending)
                if outcomes[member].error is not None and deadline is None:
                    deadline = time.monotonic() + GRACE_SECONDS
        failed = {member: outcome for member, outcome in outcomes.items() if outcome.error is not None}
        if failed:
            errors = [outcome.error for outcome in failed.values()]
            if waiting or not all(error is not None and error.harmless for error in errors):
                self.kill()
            cause = _first(failed, pending)
            self._cause = "" if self._alive else shorten(cause.message, LONGEST)
            raise cause
        self._answered = time.monotonic()
        return [outcomes[member].value for member in pending.members]

    def answers(self, pending: Pending, counted: CallCounts | None = None) -> dict[int, Any]:
        """Wait for each member's result or CorerlError. A failure does not end the other members. `counted` is called
        every few seconds with the members that have not answered, and how many parts of their calls have ended; None of
        one that does not say."""
        answers: dict[int, Any] = {}
        waiting = dict(zip(pending.refs, pending.members, strict=True))
        while waiting:
            timeout = self._look(pending, waiting.values())
            if counted is not None:
                timeout = COUNT_SECONDS if timeout is None else min(timeout, COUNT_SECONDS)
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout)
            if counted is not None and not ready:
                counts = _counts(pending, _statuses(pending, waiting.values(), within=COUNTED_WITHIN))
                counted({member: counts[member][0] if member in counts else None for member in waiting.values()})
            for ref in ready:
                member = waiting.pop(ref)
                outcome = self._outcome(ref, member, pending)
                answers[member] = outcome.value if outcome.error is None else outcome.error
        return answers

    def answered(self, pending: Pending, timeout: float) -> dict[int, Any]:
        """Like `answers`, but only of members that answer within `timeout` seconds."""
        ended, _ = ray.wait(list(pending.refs), num_returns=len(pending.refs), timeout=timeout)
        answers: dict[int, Any] = {}
        for ref, member in zip(pending.refs, pending.members, strict=True):
            if ref in ended:
                outcome = self._outcome(ref, member, pending)
                answers[member] = outcome.value if outcome.error is None else outcome.error
        return answers

    def aside(self, method: str, *args: Any) -> None:
        """Call `method` in all processes at once, even while they run other calls. Returns when all have answered,
        after `ANSWER_SECONDS` at the latest."""
        refs = [actor.call.options(concurrency_group=STATUS).remote(method, *args) for actor in self._actors]
        ray.wait(refs, num_returns=len(refs), timeout=ANSWER_SECONDS)

    def replace(self, member: int, arguments: tuple[Any, ...]) -> None:
        """Start a new process in place of a dead one and construct its object; returns when it is ready. Raises the
        error if that fails, without ending other members."""
        with self._feeling:
            ray.kill(self._actors[member], no_restart=True)  # in case it only seemed dead
            self._actors[member] = self._spawn(member)
            self._pulses[member] = Pulse(actor=self._actors[member])
        if failed := self._construct({member: arguments}):
            raise failed[0]

    def grow(self, names: Sequence[str], slots: Sequence[Slot], arguments: Sequence[tuple[Any, ...]]) -> None:
        """Start more processes, behind the last member, and construct their objects; returns when they are ready. If
        any fails, all of these are ended and the first one's error is raised; the other members go on."""
        _require_seats(names, slots)
        before = len(self)
        with self._feeling:
            self._require_alive("grow")
            self.names += names
            self._slots += slots
            for member in range(before, len(self)):
                self._actors.append(self._spawn(member))
                self._pulses.append(Pulse(actor=self._actors[member]))
        if failed := self._construct(dict(enumerate(arguments, before))):
            self.shrink(len(names))
            raise failed[0]

    def shrink(self, count: int) -> None:
        """End the last `count` members at once. To whoever waits for one of them, its process has died."""
        rest = len(self) - count
        with self._feeling:
            ended = self._actors[rest:]
            del self.names[rest:], self._slots[rest:], self._actors[rest:], self._pulses[rest:]
        for actor in ended:
            ray.kill(actor, no_restart=True)

    def reassign(self, slots: Sequence[Slot]) -> None:
        """Let processes that are started in the place of these be in other slots."""
        _require_seats(self.names, slots)
        self._slots = list(slots)

    def ready(self, pending: Pending, timeout: float) -> bool:
        """Whether `wait` would return or raise at once; waits at most `timeout` seconds for that."""
        ended, _ = ray.wait(list(pending.refs), num_returns=len(pending.refs), timeout=timeout)
        if len(ended) == len(pending.refs):
            return True
        members = dict(zip(pending.refs, pending.members, strict=True))
        self._look(pending, [members[ref] for ref in pending.refs if ref not in ended])
        return any(self._outcome(ref, members[ref], pending).error is not None for ref in ended)

    def kill(self) -> None:
        """End all processes at once; idempotent."""
        with self._feeling:
            self._alive = False
            self._ended.set()
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _pending(self, method: str, members: Collection[int], refs: Sequence[Any], asked: float) -> Pending:
        names = {member: self.names[member] for member in members}
        pulses = {member: self._pulses[member] for member in members}
        return Pending(method, tuple(members), tuple(refs), asked=asked, names=names, pulses=pulses)

    def _construct(self, arguments: Mapping[int, tuple[Any, ...]]) -> list[CorerlError]:
        """Construct these members' objects; returns why some could not be, in the members' order."""
        asked = time.time()
        refs = [self._actors[member].construct.remote(*args) for member, args in arguments.items()]
        answers = self.answers(self._pending("start", arguments, refs, asked))
        return [answers[member] for member in arguments if isinstance(answers[member], CorerlError)]

    def _require_alive(self, method: str) -> None:
        if not self._alive:
            why = f" ({self._cause})" if self._cause else ""
            raise WorkerDied(f"{self.names[0]} and its group have ended{why}; {method} can no longer be called")

    def _spawn(self, member: int) -> Any:
        return spawn(
            self.names[member],
            self.target,
            options={**self._slots[member].options(), "max_concurrency": self._threads},
            neighbors=self._slots[member].neighbors,
            environment={**self._environment, **self._slots[member].environment()},
            failure=self._failure,
            traced=self._watching.on_answer is not None,
        )

    def _look(self, pending: Pending, waiting: Collection[int]) -> float | None:
        """If due, check the members that have not answered; returns the seconds until the next check, None for never.
        Checks come in pairs, a moment apart: a call that is merely slow makes progress between them."""
        notify, seconds = self._watching.notify, self._watching.seconds
        if notify is None or not seconds:
            return None
        watch = pending.watch
        if watch.due is None:  # calls may be queued: each begins when the previous one ends
            watch.started, watch.due = max(watch.started, self._answered), seconds
        if watch.seconds >= watch.due:
            statuses = _statuses(pending, waiting)
            if watch.seen is None:
                watch.seen, watch.due = statuses, watch.seconds + SETTLE_SECONDS
            else:
                counts = _counts(pending, statuses)
                ended = {member: parts for member, (parts, _) in counts.items()}
                # A call that counts may move all the time and still end nothing.
                still = all(parts <= watch.ended.get(member, 0) for member, parts in ended.items())
                if still if counts else _stuck(watch.seen, statuses):
                    done = [member for member in pending.members if member not in waiting]
                    notify(sentence(pending.names, pending.method, watch.seconds, statuses, done, counts))
                watch.seen, watch.ended, watch.due = None, ended, 2 * watch.seconds
        return max(0.0, watch.due - watch.seconds)

    def _feel_pulse(self) -> None:
        """Look all the time whether the processes are there and get on, and end those that do not: whoever waits for
        them gets an error that names them. In a thread of its own."""
        bounds = self._watching.bounds
        while not self._ended.wait(bounds.period):
            with self._feeling:
                if self._ended.is_set():
                    return
                pulses = {member: pulse for member, pulse in enumerate(self._pulses) if pulse.ended is None}
                for pulse in pulses.values():
                    pulse.look()
                for member in bounds.silent(pulses):
                    pulses[member].end(functools.partial(silent, seconds=bounds.silence))
                for member in bounds.overdue(pulses):
                    status = pulses[member].status
                    pulses[member].end(functools.partial(overdue, seconds=bounds.start, status=status))

    def _outcome(self, ref: Any, member: int, pending: Pending) -> Outcome:
        name, method = pending.names[member], pending.method
        pulse = pending.pulses[member]
        try:
            outcome: Outcome = ray.get(ref)
            pulse.started |= not outcome.phase
            if self._watching.on_answer is not None and member not in pending.told:
                pending.told.add(member)
                self._watching.on_answer(name, pending, outcome)
            return outcome
        except RayError as error:
            if (died := death(name, method, error, pulse.status)) is not None:
                if pulse.ended is not None:
                    died = pulse.ended(name, method)
                return Outcome(error=died, ended=0.0)
            # The result cannot be pickled there, or not be unpickled here.
            lost = CorerlError(
                f"{name}: the result of {method} could not be transferred: {shorten(last_line(error), LONGEST)}"
            )
            lost.details = str(error)
            return Outcome(error=lost, ended=time.time())

    def _check_lengths(self, method: str, arguments: Sequence[Any]) -> None:
        if len(arguments) != len(self):
            raise CorerlError(
                f"{method}: got {len(arguments)} sets of arguments, expected one for each of {len(self)} processes"
            )


def _require_seats(names: Sequence[str], slots: Sequence[Slot]) -> None:
    if len(names) != len(slots):
        raise CorerlError(f"got {len(names)} processes and {len(slots)} slots; each process needs one slot")


def _first(failed: Mapping[int, Outcome], pending: Pending) -> CorerlError:
    # Deaths come first: they have no timestamp and are never a consequence. Then the earliest failure.
    member = min(failed, key=lambda index: (failed[index].ended, index))
    error = failed[member].error
    assert error is not None
    if len(failed) > 1:
        others = ", ".join(pending.names[index] for index in sorted(failed) if index != member)
        also = f"then {len(failed) - 1} of the {len(pending.members) - 1} others failed too: {others}"
        error.details = f"{error.details}\n{also}".strip()  # a consequence, which --debug shows
    return error


def _statuses(pending: Pending, members: Collection[int], within: float = ANSWER_SECONDS) -> dict[int, Status | None]:
    """The status of each of these members that were called; None if it does not answer `within` seconds."""
    actors = {member: pending.pulses[member].actor for member in members}
    asked = {actor.status.options(concurrency_group=STATUS).remote(): member for member, actor in actors.items()}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=within)
    statuses: dict[int, Status | None] = dict.fromkeys(members)
    for ref in answered:
        try:
            statuses[asked[ref]] = ray.get(ref)
        except RayError:
            continue  # it has died, which the awaited call reports
    return statuses


def _counts(pending: Pending, statuses: Mapping[int, Status | None]) -> dict[int, tuple[int, int]]:
    """How many parts of each member's call have ended, of how many; without members that do not say."""
    calls = {member: ref.task_id().hex() for ref, member in zip(pending.refs, pending.members, strict=True)}
    return {
        member: status.counts[calls[member]]
        for member, status in statuses.items()
        if status is not None and calls[member] in status.counts
    }


def _stuck(before: Mapping[int, Status | None], now: Mapping[int, Status | None]) -> bool:
    """Whether to report: no member made progress, or one does not answer or is still starting up."""
    return any(status is None or status.phase for status in now.values()) or not any(
        status.moved(earlier)
        for member, status in now.items()
        if status is not None and (earlier := before.get(member)) is not None
    )
