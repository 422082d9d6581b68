"""Several engine processes as one: requests are split over them, weights reach them all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from corerl.errors import CorerlError, EngineFailed, WorkerDied
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


class NoneLeft(WorkerDied):
    """All replicas have died, and can be replaced."""


class EngineFleet:
    """Replicas `engine-0`, `engine-1`, ... A sample depends on its noise key, never on the replica that drew it.

    A replica whose process dies while it samples is given up: others draw its share, from the same noise, so that the
    samples are those that it would have drawn. `replace_dead` puts a new process in its place, once.
    """

    def __init__(self, processes: Processes, assignments: Sequence[EngineAssignment]) -> None:
        self.processes = processes
        self.assignments = list(assignments)
        # Must replace all that died and bring weights to them, where none is left that serves.
        self.on_lost: Callable[[], None] | None = None
        self._changing = threading.Lock()
        self._dead: dict[int, WorkerDied] = {}  # not replaced yet
        self._replaced: set[int] = set()
        self._without_weights: set[int] = set()  # the dead, and those in their place until an update

    def start_async(self) -> Any:
        """Construct all replicas; `wait_started` blocks until they are there."""
        return self.processes.construct([(assignment,) for assignment in self.assignments])

    def wait_started(self, pending: Any) -> None:
        self.processes.wait(pending)

    def __len__(self) -> int:
        return len(self.assignments)

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

    # ---- sampling ---------------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> Generation:
        """Rows in the order of the request, each replica completing a run of them. To be called in the thread that
        updates weights: where no replica is left, new ones are begun. Raises what a replica raises, and what one died
        of twice."""
        while not (serving := self._serving):
            self.mend()
        return self._generate(request, serving, self.generate)

    def generate_aside(self, request: GenerateRequest) -> Generation:
        """The same in any other thread. Raises NoneLeft where no replica is left."""
        if not (serving := self._serving):
            raise NoneLeft(self._loss.message)
        return self._generate(request, serving, self.generate_aside)

    def _generate(
        self, request: GenerateRequest, serving: Sequence[int], again: Callable[[GenerateRequest], Generation]
    ) -> Generation:
        shares = dict(zip(serving, split(request, len(serving)), strict=False))
        done = self._ask("generate", {replica: (share,) for replica, share in shares.items()})
        return Generation.concatenate(
            [done[replica] if replica in done else again(share) for replica, share in shares.items()]
        )

    def draw(self, replica: int, request: GenerateRequest) -> Generation | None:
        """From one replica, in any thread; None where it has died."""
        generation: Generation | None = self._ask("generate", {replica: (request,)}).get(replica)
        return generation

    def serves(self, replica: int) -> bool:
        """Whether it lives and has weights, as far as is known."""
        return replica not in self._without_weights

    @property
    def _serving(self) -> list[int]:
        return [replica for replica in range(len(self)) if self.serves(replica)]

    def pause(self) -> None:
        """Returns when nothing is being generated; until `resume` every request is answered at once, unfinished.
        The processes need a thread for it beside those that generate."""
        self._ask_all("pause")

    def resume(self) -> None:
        self._ask_all("resume")

    # ---- deaths -----------------------------------------------------------------------------------------------------

    @property
    def dead(self) -> bool:
        """Whether one has died that is not replaced."""
        return bool(self._dead)

    def mend(self) -> None:
        """Have new replicas where none is left that serves. In the thread that updates weights."""
        if self.on_lost is None:
            raise self._loss
        self.on_lost()

    def replace_dead(self) -> dict[str, CorerlError]:
        """A new process in the place of each that has died; they serve once an update has reached them. Gives what the
        old ones died of, by name."""
        with self._changing:
            dead, self._dead = self._dead, {}
            self._replaced |= dead.keys()
        for replica in dead:
            self.processes.replace(replica, (self.assignments[replica],))
        return {self.names[replica]: error for replica, error in dead.items()}

    @property
    def _loss(self) -> CorerlError:
        return next(iter(self._dead.values()), EngineFailed("no engine is left that serves; update their weights"))

    def _ask(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """The answers of those that live. One that dies in it is noted. Raises any other failure, and a second death
        of one replica, after which none of the processes is left."""
        renewed = frozenset(self._replaced)
        answers = self.processes.answers(self.processes.start_some(method, arguments))
        failed = {replica: answer for replica, answer in answers.items() if isinstance(answer, CorerlError)}
        for replica, error in failed.items():
            with self._changing:
                if not isinstance(error, WorkerDied) or replica in renewed:
                    self.processes.kill()
                    raise error
                if replica not in self._replaced:  # else it died before it was, and is told of only now
                    self._dead[replica] = error
                    self._without_weights.add(replica)
        return {replica: answer for replica, answer in answers.items() if replica not in failed}

    def _ask_all(self, method: str, *args: Any) -> dict[int, Any]:
        return self._ask(method, dict.fromkeys((each for each in range(len(self)) if each not in self._dead), args))

    # ---- weights and memory -----------------------------------------------------------------------------------------

    def receive_async(self, manifest: Manifest, version: int, address: Address) -> Any:
        """To be started together with the group's `update_weights`."""
        return self.processes.start("receive", manifest, version, address)

    def wait_received(self, pending: Any) -> dict[str, Received]:
        received = self.processes.wait(pending)
        self._without_weights.clear()
        return dict(zip(self.names, received, strict=True))

    def sleep(self) -> int:
        """Free the weights' memory; returns bytes. Nothing is served until fresh weights have followed `wake_up`."""
        return sum(self._ask_all("sleep", frozenset({MemoryKind.PARAM})).values())

    def wake_up(self) -> int:
        """Take the weights' memory again; idempotent."""
        return sum(self._ask_all("wake_up", frozenset({MemoryKind.PARAM})).values())

    def close(self) -> None:
        """End the replicas, whatever they generate."""
        try:
            self._ask_all("pause")
            self._ask_all("close")
        finally:
            self.processes.kill()
