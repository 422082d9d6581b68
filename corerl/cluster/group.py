"""Processes that work together: call one or all of them, and when one fails, end them all with *its* error."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from attrs import frozen
from ray.exceptions import RayActorError, RayError

from corerl.cluster.placement import Seat
from corerl.cluster.process import Outcome, spawn
from corerl.errors import CorerlError, HookFailed, WorkerDied

# After a first failure the others get this long to fail too, so that the cause can be told from its consequences: a
# rank whose neighbour vanished reports a broken connection, and may do so before the neighbour's death is noticed.
GRACE_SECONDS = 3.0


@frozen(eq=False)
class Pending:
    """Calls that are under way; `ProcessGroup.wait` turns them into their results."""

    method: str
    members: tuple[int, ...]
    refs: tuple[Any, ...]


class ProcessGroup:
    """Equal processes with names such as `actor rank 0`."""

    def __init__(
        self,
        names: Sequence[str],
        target: str,
        seats: Sequence[Seat],
        environment: Mapping[str, str],
        *,
        failure: type[CorerlError] = HookFailed,
        threads: int = 1,
    ) -> None:
        """`failure` is what foreign exceptions of the processes become. With one thread calls run in the order in which
        they were started; with more, that many at once."""
        if len(names) != len(seats):
            raise CorerlError(f"{len(names)} processes for {len(seats)} seats; give each process one")
        self.names = list(names)
        self.target = target
        self._environment = dict(environment)
        self._seats = list(seats)
        self._actors = [
            spawn(
                name,
                target,
                options={**seat.options(), "max_concurrency": threads},
                environment=self._environment,
                failure=failure,
            )
            for name, seat in zip(names, seats, strict=True)
        ]
        self._alive = True

    def __len__(self) -> int:
        return len(self.names)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def construct(self, arguments: Sequence[tuple[Any, ...]]) -> Pending:
        """Construct each process's object with arguments of its own."""
        self._check_lengths("start", arguments)
        refs = [actor.construct.remote(*args) for actor, args in zip(self._actors, arguments, strict=True)]
        return Pending("start", tuple(range(len(self))), tuple(refs))

    def free_address(self, member: int) -> tuple[str, int]:
        """The member's machine as others reach it, and a port that is free there now."""
        ref = self._actors[member].free_address.remote()
        address: tuple[str, int] = self.wait(Pending("free_address", (member,), (ref,)))[0]
        return address

    def listen(self, member: int) -> tuple[str, int, int]:
        """(host, port, file descriptor there) of a socket on which the member's process listens already."""
        ref = self._actors[member].listen.remote()
        address: tuple[str, int, int] = self.wait(Pending("listen", (member,), (ref,)))[0]
        return address

    def start(self, method: str, *args: Any) -> Pending:
        """Call `method` with the same arguments in all processes. Object references among `args` are resolved there."""
        return self.start_each(method, [args] * len(self))

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Pending:
        """Call `method` in all processes, each with arguments of its own."""
        self._check_lengths(method, arguments)
        return self.start_some(method, dict(enumerate(arguments)))

    def start_some(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Pending:
        """Call `method` in the named members only."""
        if not self._alive:
            raise WorkerDied(f"{self.names[0]} and its group have ended; {method} cannot be called any more")
        refs = tuple(self._actors[member].call.remote(method, *args) for member, args in arguments.items())
        return Pending(method, tuple(arguments), refs)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.wait(self.start(method, *args))

    def wait(self, pending: Pending) -> list[Any]:
        """Results in the members' order. The first failure ends the whole group and is raised; but where all members
        have answered, and those that failed merely refused (`CorerlError.harmless`), the group goes on."""
        outcomes: dict[int, Outcome] = {}
        waiting = dict(zip(pending.refs, pending.members, strict=True))
        deadline: float | None = None
        while waiting:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout)
            if not ready:
                break
            for ref in ready:
                member = waiting.pop(ref)
                outcomes[member] = self._outcome(ref, member, pending.method)
                if outcomes[member].error is not None and deadline is None:
                    deadline = time.monotonic() + GRACE_SECONDS
        failed = {member: outcome for member, outcome in outcomes.items() if outcome.error is not None}
        if failed:
            errors = [outcome.error for outcome in failed.values()]
            if waiting or not all(error is not None and error.harmless for error in errors):
                self.kill()
            raise self._first(failed, len(pending.members))
        return [outcomes[member].value for member in pending.members]

    def ready(self, pending: Pending, timeout: float) -> bool:
        """Whether `wait` would return or raise at once, after at most `timeout` seconds."""
        ended, _ = ray.wait(list(pending.refs), num_returns=len(pending.refs), timeout=timeout)
        if len(ended) == len(pending.refs):
            return True
        members = dict(zip(pending.refs, pending.members, strict=True))
        return any(self._outcome(ref, members[ref], pending.method).error is not None for ref in ended)

    def kill(self) -> None:
        """End all processes at once; idempotent."""
        self._alive = False
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _outcome(self, ref: Any, member: int, method: str) -> Outcome:
        name = self.names[member]
        try:
            outcome: Outcome = ray.get(ref)
            return outcome
        except RayActorError as error:
            detail = _last_line(error).rpartition("Worker exit detail: ")[2].partition(" Some common causes")[0]
            died = WorkerDied(
                f"{name}: its process died during {method} ({detail.rstrip('.')}); where no one killed it, "
                "the machine's log (dmesg: out of memory?) and Ray's (/tmp/ray/session_latest/logs) may say why"
            )
            died.details = str(error)
            return Outcome(error=died, ended=0.0)
        except RayError as error:  # the result cannot be pickled here, or not be unpickled there
            lost = CorerlError(f"{name}: {method} gave a result that did not arrive: {_last_line(error)}")
            lost.details = str(error)
            return Outcome(error=lost, ended=time.time())

    def _first(self, failed: Mapping[int, Outcome], called: int) -> CorerlError:
        # A death has no time of its own and is never a consequence, so it comes first; then whoever failed earliest.
        member = min(failed, key=lambda index: (failed[index].ended, index))
        error = failed[member].error
        assert error is not None
        if len(failed) > 1:
            others = ", ".join(self.names[index] for index in sorted(failed) if index != member)
            error.add_note(f"after it {len(failed) - 1} of {called - 1} others failed too: {others}")
        return error

    def _check_lengths(self, method: str, arguments: Sequence[Any]) -> None:
        if len(arguments) != len(self):
            raise CorerlError(f"{method}: {len(arguments)} sets of arguments for {len(self)} processes")


def _last_line(error: RayError) -> str:
    """Ray's errors end with what is new."""
    return str(error).strip().splitlines()[-1].strip()
