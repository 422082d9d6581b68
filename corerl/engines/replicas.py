"""The processes of a run's engines: what each can do, calls of them, and replacements of dead ones."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from attrs import define, field

from corerl.calls import Future
from corerl.engines.batching import Batcher
from corerl.engines.service import EngineAssignment
from corerl.errors import CorerlError, ResizeFailed, WorkerDied

if TYPE_CHECKING:
    from corerl.cluster.group import CallCounts, RayGroup

STARTING_SECONDS = 1.0  # between two polls of replicas that are starting
END_SECONDS = 5.0  # for calls to notice that their processes have been killed
CLOSE_SECONDS = 60.0  # for a replica to shut down by itself


class State(Enum):
    """What a replica can do now. Requests go only to those that serve; all but the dead ones get other calls.

    EMPTY   -> SERVING  it has taken an update
    SERVING -> EMPTY    it has missed an update, or sleeps
    any     -> DEAD     its process has died or hangs, or `replace` or `resize` ends it

    A replica stays dead: `replace` puts another one in its place, which is empty once its process has started."""

    EMPTY = "no weights"
    SERVING = "serving"
    DEAD = "dead"


@define(kw_only=True, eq=False)
class Replica:
    """One engine process, from its start to its end. Its successor under the same name is another replica, so that
    what was asked of the old process, or comes back from it, is not taken for the new one's."""

    assignment: EngineAssignment
    restarts: int = 0  # of this name, since the last completed step
    state: State = State.EMPTY
    held: tuple[int, ...] = ()  # versions of the weights that it can sample from, if it serves; the newest last
    died_of: CorerlError | None = None  # if it is dead
    batcher: Batcher = field(init=False)

    @property
    def name(self) -> str:
        return self.assignment.context.name

    def died(self, error: CorerlError) -> None:
        self.state, self.died_of = State.DEAD, error


class Replicas(ABC):
    """Replicas `engine-0`, `engine-1`, ... Any thread may make calls; all else is for the one that updates weights."""

    def __init__(self, processes: RayGroup, assignments: Sequence[EngineAssignment], *, restarts: int) -> None:
        """`restarts`: how often a replica may be restarted without a completed step in between."""
        self.processes = processes
        self._allowed = restarts
        self._changing = threading.Condition()
        self._calls_in_progress = 0
        self._replicas: list[Replica] = [self._replica(each) for each in assignments]  # in the order of their processes
        self._failure: CorerlError | None = None  # why all processes were killed; later deaths follow from it

    @abstractmethod
    def _batcher(self, replica: Replica) -> Batcher:
        """The requests of a new replica."""

    @abstractmethod
    def _apply_changes(self) -> None:
        """Called when replicas have come or gone; returns when requests are routed by that."""

    def _replica(self, assignment: EngineAssignment, *, restarts: int = 0) -> Replica:
        replica = Replica(assignment=assignment, restarts=restarts)
        replica.batcher = self._batcher(replica)
        return replica

    def start(self) -> Future[dict[str, CorerlError]]:
        """Construct all replicas; the result is there when they are ready. It says which have died meanwhile, and why:
        these are to be replaced."""
        processes = self.processes
        constructing = processes.construct([(assignment,) for assignment in self.assignments])

        def ready(timeout: float) -> bool:
            return processes.ready(constructing, timeout)

        def wait() -> dict[str, CorerlError]:
            while not ready(STARTING_SECONDS):
                pass
            failed = self._errors(processes.answers(constructing, timeout=0.0))
            if failed and all(isinstance(error, WorkerDied) for error in failed.values()):
                failed = self._errors(processes.answers(constructing))  # of the others too
            for error in failed.values():
                if not isinstance(error, WorkerDied):
                    processes.kill()
                    raise error
            return failed

        return Future(processes, ready, wait)

    def _errors(self, answers: Mapping[int, Any]) -> dict[str, CorerlError]:
        return {self.names[index]: each for index, each in answers.items() if isinstance(each, CorerlError)}

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def assignments(self) -> list[EngineAssignment]:
        return [each.assignment for each in self._replicas]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self._replicas)

    @property
    def receivers(self) -> tuple[str, ...]:
        """The engine name of each weight receiver, by index; an engine with several receivers is repeated."""
        return tuple(each.context.name for each in self.assignments for _ in range(each.context.bundles))

    # ---- deaths -----------------------------------------------------------------------------------------------------

    @property
    def dead(self) -> bool:
        """Whether any dead replica is not replaced yet."""
        return any(each.state is State.DEAD for each in self._replicas)

    @property
    def died(self) -> dict[str, CorerlError]:
        """The cause of each death, by name, of replicas that are not replaced yet, in their order."""
        with self._changing:
            return {each.name: each.died_of for each in self._replicas if each.died_of is not None}

    def leave_out(self, failed: Mapping[str, CorerlError]) -> None:
        """Send no more calls to these hanging or failing engines until they are replaced."""
        with self._changing:
            for each in self._replicas:
                if each.name in failed:
                    each.died(failed[each.name])

    def replace(self, failed: Mapping[str, CorerlError]) -> None:
        """Start new processes in place of these engines, dead or alive; `failed` maps each name to the reason. They
        serve once an update has reached them; a failed start is retried. Raises the error of an engine whose restarts
        since the last completed step are used up.
        """
        indices = {self.names.index(name): error for name, error in failed.items()}
        for index, error in indices.items():
            self._require_allowed(self._replicas[index], error)
        for index, error in indices.items():
            failure = self._restart(index, error)
            while failure is not None:
                self._require_allowed(self._replicas[index], failure)
                failure = self._restart(index, failure)
        self._apply_changes()

    def _restart(self, index: int, died_of: CorerlError) -> CorerlError | None:
        """Start a new process in place of a replica's; returns why it did not start, or None."""
        old = self._replicas[index]
        new = self._replica(old.assignment, restarts=old.restarts + 1)
        with self._changing:
            old.died(died_of)
            new.died(died_of)  # it gets no calls until it is ready
            self._replicas[index] = new  # before the old process ends, whose death is not the new replica's
        try:
            self.processes.replace(index, (new.assignment,))
        except CorerlError as error:
            return error
        with self._changing:
            new.state, new.died_of = State.EMPTY, None
        return None

    def step_completed(self) -> None:
        """Reset the count of restarts."""
        for each in self._replicas:
            each.restarts = 0

    def _require_allowed(self, replica: Replica, error: CorerlError) -> None:
        """Kill all processes and raise `error` if the replica's restarts are used up."""
        if self._failure is not None:
            raise self._failure
        if replica.restarts < self._allowed:
            return
        self._failure = error
        self.processes.kill()
        if restarts := replica.restarts:
            error.add_note(
                f"the engine had already been restarted {restarts} time{'s' * (restarts > 1)} (rollout.restarts)"
            )
        raise error

    def _ask(
        self, method: str, arguments: Mapping[Replica, tuple[Any, ...]], on_counts: CallCounts | None = None
    ) -> dict[Replica, Any]:
        """Return the answers of the live replicas, and mark those that died. On any other failure, or when a dead
        replica's restarts are used up, kill all processes and raise the error. Replicas that were replaced or ended are
        not called; if that happens during their call, its failure is ignored."""
        try:
            with self._changing:
                self._calls_in_progress += 1
                asked = {index: each for index, each in enumerate(self._replicas) if each in arguments}
                pending = self.processes.start_some(method, {index: arguments[each] for index, each in asked.items()})
            found = self.processes.answers(pending, on_counts=on_counts)
        except WorkerDied as gone:  # none can be asked any more
            raise self._failure or gone from None
        finally:
            with self._changing:
                self._calls_in_progress -= 1
                self._changing.notify_all()
        answers = {asked[index]: answer for index, answer in found.items()}
        for replica, error in answers.items():
            if not isinstance(error, CorerlError):
                continue
            with self._changing:
                if replica not in self._replicas:
                    continue
                if isinstance(error, WorkerDied):
                    replica.died(error)
            if not isinstance(error, WorkerDied):
                self._failure = self._failure or error
                self.processes.kill()
                raise error
            self._require_allowed(replica, error)
        return {replica: answer for replica, answer in answers.items() if not isinstance(answer, CorerlError)}

    def _ask_all(self, method: str, *args: Any) -> dict[Replica, Any]:
        return self._ask(method, {each: args for each in self._replicas if each.state is not State.DEAD})

    # ---- more or fewer ----------------------------------------------------------------------------------------------

    def resize(self, assignments: Sequence[EngineAssignment], slots: Sequence[Any]) -> None:
        """Start or end processes, so that there is one for each assignment, in its slot (as `RayGroup` takes them).
        Replicas that stay keep their assignments, and may be sampling meanwhile.

        New replicas are awake, and serve once an update has reached them. If any does not start, the fleet stays as it
        was, and ResizeFailed is raised. If there are too many replicas, the last ones end, dead or alive; the
        others continue their rows, and the samples are the same."""
        if len(assignments) > len(self):
            self._add(assignments[len(self) :], slots[len(self) :])
        elif len(assignments) < len(self):
            self._end_last(len(self) - len(assignments))

    def reassign(self, assignments: Sequence[EngineAssignment], slots: Sequence[Any]) -> None:
        """Give processes of a lost machine, which `replace` restarts, other slots and assignments; those that live
        keep theirs. If there are fewer assignments than replicas, the last replicas end, as in `resize`."""
        if len(assignments) < len(self):
            self._end_last(len(self) - len(assignments))
        with self._changing:
            for replica, assignment in zip(self._replicas, assignments, strict=True):
                replica.assignment = assignment
            self.processes.reassign(slots)

    def _add(self, assignments: Sequence[EngineAssignment], slots: Sequence[Any]) -> None:
        names = [assignment.context.name for assignment in assignments]
        replicas = len(self) + len(names)
        try:
            self.processes.grow(names, slots, [(assignment,) for assignment in assignments])
        except CorerlError as error:
            if self._failure is not None:  # meanwhile, of all
                raise self._failure from None
            stays = ResizeFailed(
                f"the engines stay {len(self)} and do not become {replicas}, since not all of {', '.join(names)} have "
                f"started: {error.message}"
            )
            stays.details = error.details
            raise stays from error
        with self._changing:
            self._replicas = [*self._replicas, *map(self._replica, assignments)]
        self._apply_changes()

    def _end_last(self, count: int) -> None:
        with self._changing:
            rest, ended = self._replicas[:-count], self._replicas[-count:]
            living = [index for index, each in enumerate(ended, len(rest)) if each.state is not State.DEAD]
            for each in ended:
                each.state = State.DEAD
            self._replicas = rest  # from now on the others get no calls, and their deaths do not count
        self._apply_changes()
        try:
            self._close(lambda method: self.processes.start_some(method, dict.fromkeys(living, ())))
        except WorkerDied as gone:  # all have
            raise self._failure or gone from None
        self.processes.shrink(count)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the replicas, even while they generate or hang."""
        try:
            self._close(self.processes.start)
        finally:
            self.end()

    def _close(self, start: Callable[[str], Any]) -> None:
        """Let the replicas that `start` asks shut down by themselves; what they generate comes back unfinished."""
        for method in ("pause", "close"):  # a replica that dies here has ended too
            self.processes.answers(start(method), timeout=CLOSE_SECONDS)

    def end(self) -> None:
        """End the processes at once, and whoever waits for them: when this returns, nobody asks Ray any more."""
        self.processes.kill()
        with self._changing:
            self._changing.wait_for(lambda: not self._calls_in_progress, END_SECONDS)
