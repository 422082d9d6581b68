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
    def replace(self, member: int, arguments: tuple[Any, ...]) -> None: ...
    def kill(self) -> None: ...


class EngineFleet:
    """Replicas `engine-0`, `engine-1`, ... A sample depends on its noise key, never on the replica that drew it."""

    def __init__(self, processes: Processes, assignments: Sequence[EngineAssignment]) -> None:
        self.processes = processes
        self.assignments = list(assignments)
        # Must bring weights to those that are new, before they serve; engine -> what it died of.
        self.on_replaced: Callable[[Mapping[str, CorerlError]], None] | None = None
        self._replaced: set[int] = set()

    def start_async(self) -> Any:
        """Construct all replicas; `wait_started` blocks until they are there."""
        return self.processes.construct([(assignment,) for assignment in self.assignments])

    def wait_started(self, pending: Any) -> None:
        self.processes.wait(pending)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(assignment.context.name for assignment in self.assignments)

    @property
    def receivers(self) -> tuple[str, ...]:
        """Of weights, in the order of their index: an engine, or each rank of one that has several."""
        return tuple(
            name if context.bundles == 1 else f"{name} rank {rank}"
            for name, context in ((each.context.name, each.context) for each in self.assignments)
            for rank in range(context.bundles)
        )

    def by_engine(self, reports: Mapping[str, str]) -> dict[str, str]:
        """What a sender tells of each receiver, as what befell each engine: "", or the first that went wrong."""
        receivers = self.receivers
        return {
            each.context.name: next(
                filter(None, (reports.get(receivers[index], "no word of it") for index in each.context.receivers)), ""
            )
            for each in self.assignments
        }

    def generate(self, request: GenerateRequest) -> Generation:
        """Rows in the order of the request, each replica completing a run of them.

        A replica whose process dies in it is replaced, once, and its share drawn again: from the same noise, so that
        the samples are those that it would have drawn. Raises what a replica raises, and what one died of twice.
        """
        shares = {replica: (part,) for replica, part in enumerate(split(request, len(self.processes)))}
        done: dict[int, Generation] = {}
        while left := {replica: share for replica, share in shares.items() if replica not in done}:
            answers = self.processes.answers(self.processes.start_some("generate", left))
            failed = {replica: answer for replica, answer in answers.items() if isinstance(answer, CorerlError)}
            done |= {replica: answer for replica, answer in answers.items() if replica not in failed}
            if failed:
                self._replace(failed)
        return Generation.concatenate([done[replica] for replica in shares])

    def _replace(self, failed: Mapping[int, CorerlError]) -> None:
        for replica, error in failed.items():
            if not isinstance(error, WorkerDied) or replica in self._replaced or self.on_replaced is None:
                self.processes.kill()
                raise error
        for replica in failed:
            self._replaced.add(replica)
            self.processes.replace(replica, (self.assignments[replica],))
        assert self.on_replaced is not None
        self.on_replaced({self.names[replica]: error for replica, error in failed.items()})

    def receive_async(self, manifest: Manifest, version: int, address: Address) -> Any:
        """To be started together with the group's `update_weights`."""
        return self.processes.start("receive", manifest, version, address)

    def wait_received(self, pending: Any) -> dict[str, Received]:
        return dict(zip(self.names, self.processes.wait(pending), strict=True))

    def pause(self) -> None:
        """Returns when nothing is being generated; further requests wait for `resume`. The processes need
        two threads."""
        self.processes.wait(self.processes.start("pause"))

    def resume(self) -> None:
        self.processes.wait(self.processes.start("resume"))

    def sleep(self) -> int:
        """Free the weights' memory; returns bytes. Nothing is served until fresh weights have followed `wake_up`."""
        return sum(self.processes.wait(self.processes.start("sleep", frozenset({MemoryKind.PARAM}))))

    def wake_up(self) -> int:
        """Take the weights' memory again; idempotent."""
        return sum(self.processes.wait(self.processes.start("wake_up", frozenset({MemoryKind.PARAM}))))

    def close(self) -> None:
        """End the replicas."""
        try:
            self.processes.wait(self.processes.start("close"))
        finally:
            self.processes.kill()
