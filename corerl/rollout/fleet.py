"""Several engine processes as one: requests are split over them, weights reach them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

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
    def kill(self) -> None: ...


class EngineFleet:
    """Replicas `engine-0`, `engine-1`, ... A sample depends on its noise key, never on the replica that drew it."""

    def __init__(self, processes: Processes, assignments: Sequence[EngineAssignment]) -> None:
        self.processes = processes
        self.assignments = list(assignments)

    def start_async(self) -> Any:
        """Construct all replicas; `wait_started` blocks until they are there."""
        return self.processes.construct([(assignment,) for assignment in self.assignments])

    def wait_started(self, pending: Any) -> None:
        self.processes.wait(pending)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(assignment.context.name for assignment in self.assignments)

    def generate(self, request: GenerateRequest) -> Generation:
        """Rows in the order of the request, each replica completing a run of them."""
        shares = {replica: (part,) for replica, part in enumerate(split(request, len(self.processes)))}
        parts: list[Generation] = self.processes.wait(self.processes.start_some("generate", shares))
        return Generation.concatenate(parts)

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
