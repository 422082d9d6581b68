"""Several engine processes as one: requests are split over them, weights reach them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from corerl.errors import CorerlError, WorkerDied
from corerl.rollout.engine import GenerateRequest, Generation, Received
from corerl.rollout.pool import split
from corerl.rollout.service import EngineAssignment
from corerl.types import MemoryKind
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address


class Processes(Protocol):
    """What the fleet needs of a group of processes; `corerl.cluster.ProcessGroup` is one."""

    def __len__(self) -> int: ...
    def construct(self, arguments: Sequence[tuple[Any, ...]]) -> Any: ...
    def start(self, method: str, *args: Any) -> Any: ...
    def start_some(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Any: ...
    def wait(self, pending: Any) -> list[Any]: ...
    def ready(self, pending: Any, timeout: float) -> bool: ...
    def answers(self, pending: Any) -> dict[int, Any]: ...
    def answered(self, pending: Any, timeout: float) -> dict[int, Any]: ...
    def replace(self, member: int, arguments: tuple[Any, ...]) -> None: ...
    def kill(self) -> None: ...


class EngineFleet:
    """Replicas `engine-0`, `engine-1`, ... A sample depends on its noise key, never on the replica that drew it."""

    def __init__(self, processes: Processes, assignments: Sequence[EngineAssignment], *, restarts: int = 0) -> None:
        """`restarts`: how often in a row a replica is started anew, without a step completed in between."""
        self.processes = processes
        self.assignments = list(assignments)
        self._allowed = restarts
        self._restarts: dict[str, int] = {}  # by engine, since a step was completed
        # Must bring weights to those that are new, before they serve; engine -> what it died of.
        self.on_replaced: Callable[[Mapping[str, CorerlError]], None] | None = None

    def start_async(self) -> Any:
        """Construct all replicas; `wait_started` blocks until they are there."""
        return self.processes.construct([(assignment,) for assignment in self.assignments])

    def wait_started(self, pending: Any) -> None:
        self.processes.wait(pending)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(assignment.context.name for assignment in self.assignments)

    def generate(self, request: GenerateRequest) -> Generation:
        """Rows in the order of the request, each replica completing a run of them.

        A replica whose process dies in it is replaced, and its share drawn again: from the same noise, so that the
        samples are those that it would have drawn. Raises what a replica raises, and what one died of too often.
        """
        shares = {replica: (part,) for replica, part in enumerate(split(request, len(self.processes)))}
        done: dict[int, Generation] = {}
        while left := {replica: share for replica, share in shares.items() if replica not in done}:
            answers = self.processes.answers(self.processes.start_some("generate", left))
            failed = {replica: answer for replica, answer in answers.items() if isinstance(answer, CorerlError)}
            done |= {replica: answer for replica, answer in answers.items() if replica not in failed}
            if failed:
                self._take_place_of(failed)
        return Generation.concatenate([done[replica] for replica in shares])

    def _take_place_of(self, failed: Mapping[int, CorerlError]) -> None:
        bring_weights = self.on_replaced
        for error in failed.values():
            if not isinstance(error, WorkerDied) or bring_weights is None:
                self.processes.kill()
                raise error
        assert bring_weights is not None
        died = {self.names[replica]: error for replica, error in failed.items()}
        self.replace(died)
        bring_weights(died)

    def replace(self, failed: Mapping[str, CorerlError]) -> None:
        """New processes, without weights, in the place of these engines, dead or alive; engine -> why.

        Raises the error of one that has been replaced as often as is allowed since a step was completed.
        """
        for name, error in failed.items():
            restarts = self._restarts.get(name, 0)
            if restarts >= self._allowed:
                self.processes.kill()
                if restarts:
                    error.add_note(f"it was started anew {restarts} times before (rollout.restarts)")
                raise error
        for name in failed:
            self._restarts[name] = self._restarts.get(name, 0) + 1
            replica = self.names.index(name)
            self.processes.replace(replica, (self.assignments[replica],))

    def step_completed(self) -> None:
        """From here on restarts are counted anew."""
        self._restarts.clear()

    def receive_async(self, manifest: Manifest, version: int, address: Address) -> Any:
        """To be started together with the group's `update_weights`."""
        return self.processes.start("receive", manifest, version, address)

    def received(self, pending: Any, timeout: float) -> dict[str, Received]:
        """How the engines fared that have answered after at most `timeout` seconds; a death is an answer."""
        return {
            self.names[replica]: _received(each) for replica, each in self.processes.answered(pending, timeout).items()
        }

    def wait_received(self, pending: Any) -> dict[str, Received]:
        return {self.names[replica]: _received(each) for replica, each in self.processes.answers(pending).items()}

    def weight_sums(self, dtype: str) -> dict[str, Mapping[str, int] | None]:
        """What each engine says that it holds (`Engine.weight_sums`); one that has died says nothing."""
        answers = self.processes.answers(self.processes.start("weight_sums", dtype))
        self._raise_living(answers)
        return {self.names[replica]: each for replica, each in answers.items() if not isinstance(each, CorerlError)}

    def pause(self) -> None:
        """Returns when nothing is being generated; further requests wait for `resume`. The processes need
        two threads."""
        self._each("pause")

    def resume(self) -> None:
        self._each("resume")

    def sleep(self) -> int:
        """Free the weights' memory; returns bytes. Nothing is served until fresh weights have followed `wake_up`."""
        return sum(self._each("sleep", frozenset({MemoryKind.PARAM})))

    def wake_up(self) -> int:
        """Take the weights' memory again; idempotent."""
        return sum(self._each("wake_up", frozenset({MemoryKind.PARAM})))

    def close(self) -> None:
        """End the replicas."""
        try:
            self._each("close")
        finally:
            self.processes.kill()

    def _each(self, method: str, *args: Any) -> list[Any]:
        """What the replicas answer. One that has died is left out: the next update or request finds it, and replaces
        it. Raises the error of one that lives."""
        answers = self.processes.answers(self.processes.start(method, *args))
        self._raise_living(answers)
        return [answer for answer in answers.values() if not isinstance(answer, CorerlError)]

    def _raise_living(self, answers: Mapping[int, Any]) -> None:
        for error in answers.values():
            if isinstance(error, CorerlError) and not isinstance(error, WorkerDied):
                self.processes.kill()
                raise error


def _received(answer: Received | CorerlError) -> Received:
    if isinstance(answer, CorerlError):
        return Received(version=-1, bytes=0, error=answer.message, died=isinstance(answer, WorkerDied))
    return answer
