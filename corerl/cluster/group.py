"""Call processes that work together, singly or all at once; if one fails, end all and raise *its* error. And objects
that have a process each, for what no placement has bundles for."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from corerl.cluster.failures import LONGEST, death
from corerl.cluster.heartbeat import ASIDE, Heartbeats, Member, Pending, Watching, counts_of, listed
from corerl.cluster.nodes import require_ray
from corerl.cluster.placement import Slot
from corerl.cluster.process import CallResult, spawn
from corerl.errors import CorerlError, HookFailed, SaveFailed, WorkerDied
from corerl.messages import last_line, shorten

# After a first failure the others get this long to fail too, to tell the cause from its consequences: a rank whose
# neighbor vanished reports a broken connection, possibly before the neighbor's death is noticed.
GRACE_SECONDS = 3.0
COUNT_SECONDS = 2.0  # between two reports of how far a call is
ASIDE_SECONDS = 5.0  # for processes to answer a call while others run


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
        self.target = target
        self._environment = dict(environment)
        self.slots = list(slots)
        self._failure = failure
        self._threads = threads
        self.watching = watching or Watching()
        require_ray()
        self._members = [self._spawn(*each) for each in zip(names, slots, strict=True)]
        self._numbers = itertools.count()  # of calls
        self.ended = False  # whether it was killed, by its owner or because a member failed
        self._cause = ""  # the error that has ended the group, in a line
        self._heartbeats = Heartbeats(self.watching, self._members)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def names(self) -> list[str]:
        return [member.name for member in self._members]

    @property
    def nodes(self) -> list[str]:
        """Ray's id of each member's machine."""
        return [slot.node for slot in self.slots]

    # ---- calls ------------------------------------------------------------------------------------------------------

    def construct(self, arguments: Sequence[tuple[Any, ...]]) -> Pending:
        """Construct each process's object, each with its own arguments."""
        return self._start("construct", dict(zip(range(len(self)), arguments, strict=True)), "start")

    def listen(self, member: int) -> tuple[str, int, int]:
        """Open a listening socket in the member's process, as `Process.listen`; returns (host, port, file descriptor
        there)."""
        address: tuple[str, int, int] = self.wait(self._start("listen", {member: ()}, "listen"))[0]
        return address

    def start(self, method: str, *args: Any, at: str = "") -> Pending:
        """Call `method` in all processes with the same arguments. Ray resolves object references among `args` there."""
        return self.start_each(method, [args] * len(self), at=at)

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]], *, at: str = "") -> Pending:
        """Call `method` in all processes, each with its own arguments. `at` is the step, for messages."""
        return self.start_some(method, dict(zip(range(len(self)), arguments, strict=True)), at=at)

    def start_some(self, method: str, arguments: Mapping[int, tuple[Any, ...]], *, at: str = "") -> Pending:
        """Call `method` only in the members that `arguments` names."""
        self._require_alive(method)
        calls = {member: (method, *args) for member, args in arguments.items()}
        return self._start("call", calls, f"{method} at {at}" if at else method)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.wait(self.start(method, *args))

    def wait(self, pending: Pending) -> list[Any]:
        """Results in the members' order. The first failure ends the whole group and is raised; but if all members
        answered and every failure was a mere refusal (`CorerlError.harmless`), the group lives on."""
        results: dict[int, CallResult] = {}
        waiting = pending.by_ref
        deadline: float | None = None
        while waiting:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout)
            if not ready:
                break
            for ref in ready:
                member = waiting.pop(ref)
                results[member] = self._result(ref, member, pending)
                if deadline is None and _stops(results[member]):
                    deadline = time.monotonic() + GRACE_SECONDS
        failed = {member: result for member, result in results.items() if result.error is not None}
        if failed:
            errors = [result.error for result in failed.values()]
            if waiting or not all(error is not None and error.harmless for error in errors):
                self.kill()
            cause = _first(failed, pending, waiting.values())
            self._cause = shorten(cause.message, LONGEST) if self.ended else ""
            raise cause
        return [results[member].value for member in pending.members]

    def answers(
        self, pending: Pending, *, timeout: float | None = None, on_ended: Callable[[int], None] | None = None
    ) -> dict[int, Any]:
        """Each member's result or CorerlError, of those that answer within `timeout` seconds. A failure does not end
        the other members. `on_ended` is called every few seconds, for each member that has not answered and reports it,
        with how many parts of its call have ended."""
        members = pending.by_ref

        def wait(seconds: float | None) -> tuple[list[Any], list[Any]]:
            return ray.wait(list(members), num_returns=len(members), timeout=seconds)

        while on_ended is not None and (running := wait(COUNT_SECONDS)[1]):
            for ended, _ in counts_of(pending, [members[ref] for ref in running]).values():
                on_ended(ended)
        return {members[ref]: self._answer(ref, members[ref], pending) for ref in wait(timeout)[0]}

    def ready(self, pending: Pending, timeout: float) -> bool:
        """Whether `wait` would return or raise at once; waits at most `timeout` seconds for that."""
        members = pending.by_ref
        ended, waiting = ray.wait(list(members), num_returns=len(members), timeout=timeout)
        return not waiting or any(_stops(self._result(ref, members[ref], pending)) for ref in ended)

    def aside(self, method: str, *args: Any) -> None:
        """Call `method` in all processes at once, even while they run other calls. Returns when all have answered,
        after `ASIDE_SECONDS` at the latest."""
        refs = [
            member.actor.call.options(concurrency_group=ASIDE).remote(next(self._numbers), method, *args)
            for member in self._members
        ]
        ray.wait(refs, num_returns=len(refs), timeout=ASIDE_SECONDS)

    # ---- members ----------------------------------------------------------------------------------------------------

    def replace(self, member: int, arguments: tuple[Any, ...]) -> None:
        """Start a new process in place of a dead one and construct its object; returns when it is ready. Raises the
        error if that fails, without ending other members."""
        require_ray()
        with self._heartbeats.lock:
            ray.kill(self._members[member].actor, no_restart=True)  # in case it only seemed dead
            self._members[member] = self._spawn(self._members[member].name, self.slots[member])
        self._construct({member: arguments})

    def grow(self, names: Sequence[str], slots: Sequence[Slot], arguments: Sequence[tuple[Any, ...]]) -> None:
        """Start more processes, behind the last member, and construct their objects; returns when they are ready. If
        any fails, all of these are ended and the first one's error is raised; the other members go on."""
        before = len(self)
        with self._heartbeats.lock:
            self._require_alive("grow")
            self.slots += slots
            self._members += [self._spawn(*each) for each in zip(names, slots, strict=True)]
        try:
            self._construct(dict(enumerate(arguments, before)))
        except CorerlError:
            self.shrink(len(names))
            raise

    def shrink(self, count: int) -> None:
        """End the last `count` members at once. To whoever waits for one of them, its process has died."""
        rest = len(self) - count
        with self._heartbeats.lock:
            ended = self._members[rest:]
            del self._members[rest:], self.slots[rest:]
        for member in ended:
            ray.kill(member.actor, no_restart=True)

    def reassign(self, slots: Sequence[Slot]) -> None:
        """Let processes that are started in the place of these be in other slots."""
        self.slots = list(slots)

    def kill(self) -> None:
        """End all processes at once; idempotent."""
        with self._heartbeats.lock:
            self.ended = True
            self._heartbeats.stop()
        for member in self._members:
            ray.kill(member.actor, no_restart=True)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _start(self, remote: str, arguments: Mapping[int, tuple[Any, ...]], method: str) -> Pending:
        """Start a method of the actors."""
        number, asked = next(self._numbers), time.time()
        members = {index: self._members[index] for index in arguments}
        refs = [getattr(members[index].actor, remote).remote(number, *args) for index, args in arguments.items()]
        pending = Pending(method, number, members, tuple(refs), asked=asked)
        self._heartbeats.watch(pending)
        return pending

    def _construct(self, arguments: Mapping[int, tuple[Any, ...]]) -> None:
        """Construct these members' objects; raises the first error, in their order, once all have answered."""
        answers = self.answers(self._start("construct", arguments, "start"))
        for member in arguments:
            if isinstance(answers[member], CorerlError):
                raise answers[member]

    def _require_alive(self, method: str) -> None:
        if self.ended:
            why = f" ({self._cause})" if self._cause else ""
            raise WorkerDied(f"{self.names[0]} and its group have ended{why}; {method} can no longer be called")

    def _spawn(self, name: str, slot: Slot) -> Member:
        actor = spawn(
            name,
            self.target,
            options={**slot.options(), "max_concurrency": self._threads},
            neighbors=slot.neighbors,
            environment={**self._environment, **slot.environment()},
            failure=self._failure,
            traced=self.watching.on_answer is not None,
            forks=slot.forks,
        )
        return Member(name, actor, self.watching.patience)

    def _answer(self, ref: Any, index: int, pending: Pending) -> Any:
        result = self._result(ref, index, pending)
        return result.value if result.error is None else result.error

    def _result(self, ref: Any, index: int, pending: Pending) -> CallResult:
        member = pending.members[index]
        try:
            result: CallResult = ray.get(ref)
        except RayError as error:
            place = member.last.place if member.last is not None else ""
            if (died := death(error, member.name, pending.method, killed=member.killed, place=place)) is not None:
                return CallResult(error=died, ended=0.0)
            # The result cannot be pickled there, or not be unpickled here.
            why = shorten(last_line(error), LONGEST)
            lost = CorerlError(f"{member.name}: the result of {pending.method} could not be transferred: {why}")
            lost.details = str(error)
            return CallResult(error=lost, ended=time.time())
        if not result.phase:
            member.note_started()
        if self.watching.on_answer is not None and index not in pending.reported:
            pending.reported.add(index)
            self.watching.on_answer(member.name, pending, result)
        return result


def _stops(result: CallResult) -> bool:
    """Whether the other members' results are waited for no longer. What one rank cannot save, no other waits for: they
    finish what they write."""
    return result.error is not None and not isinstance(result.error, SaveFailed)


def _first(failed: Mapping[int, CallResult], pending: Pending, waiting: Iterable[int]) -> CorerlError:
    """The cause of the failures, with what follows from it in its details. `waiting` members have not answered."""
    # Deaths come first: they have no timestamp and are never a consequence. Then the earliest failure.
    index = min(failed, key=lambda index: (failed[index].ended, index))
    error = failed[index].error
    assert error is not None
    silent = [member for each in waiting if (member := pending.members[each]).silent]
    if silent:  # a rank whose neighbor is frozen reports that a collective has timed out
        named = type(error)(f"{error.message}; {listed(silent)} had sent no heartbeat for a while")
        named.__dict__.update(error.__dict__)
        error = named
    if len(failed) > 1:
        others = ", ".join(pending.members[each].name for each in sorted(failed) if each != index)
        also = f"then {len(failed) - 1} of the {len(pending.members) - 1} others failed too: {others}"
        error.details = f"{error.details}\n{also}".strip()  # a consequence, which --debug shows
    return error


class RemoteObject:
    """An object of a plain class in a process of its own. The process reserves no resources, and ends with the one that
    has started it. Any thread may use it."""

    def __init__(self, name: str, target: str, *args: Any, node: str, environment: Mapping[str, str]) -> None:
        """Have `target`, "module:Class", called with `args` in a new process on this node (Ray's id); waits for
        nothing. `name` is for messages, `environment` is set before the class is imported."""
        self._name = name
        there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        self._actor = spawn(
            name,
            target,
            options={"num_cpus": 0, "scheduling_strategy": there},
            neighbors=os.cpu_count() or 1,  # any number of them may be there: one thread each
            environment=dict(environment),
        )
        self._made = self._actor.construct.remote(0, *args)

    def send(self, method: str, *args: Any) -> None:
        """Have a method called, after those that were sent before; waits for nothing, and raises nothing."""
        self._actor.call.remote(0, method, *args)

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method beside those that are sent, and wait for its result. Raises WorkerDied if the process or its
        node is gone, and the CorerlError of the method or of the object's construction."""
        try:
            result = ray.get(self._made)
            if result.error is None:
                result = ray.get(self._actor.call.options(concurrency_group=ASIDE).remote(0, method, *args))
        except RayError as error:
            why = f"{self._name}: the arguments or the result of {method} could not be transferred: {last_line(error)}"
            raise death(error, self._name, method) or CorerlError(why) from error
        if result.error is not None:
            raise result.error
        return result.value

    def kill(self) -> None:
        """End the process, which may answer a call that reaches it before Ray does. Idempotent."""
        ray.kill(self._actor, no_restart=True)
