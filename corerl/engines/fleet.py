"""Use several engine processes as one: requests are split over them, weights go to all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from corerl.calls import Future
from corerl.engines.base import GenerateRequest, Generation, Received
from corerl.engines.prefix_router import PrefixRouter, in_order
from corerl.engines.service import EngineAssignment
from corerl.errors import CorerlError, EngineFailed, WorkerDied
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address

CLOSE_SECONDS = 60.0  # for a replica to shut down by itself

Counted = Callable[[int, int], None]  # called with how many are done, and how many there are
CallCounts = Callable[[Mapping[int, int | None]], None]  # as `RayGroup.answers` calls it


class Processes(Protocol):
    """The group of processes that a fleet runs on, such as `corerl.cluster.group.RayGroup`."""

    def __len__(self) -> int: ...
    def construct(self, arguments: Sequence[tuple[Any, ...]]) -> Any: ...
    def start(self, method: str, *args: Any) -> Any: ...
    def start_some(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Any: ...
    def wait(self, pending: Any) -> list[Any]: ...
    def ready(self, pending: Any, timeout: float) -> bool: ...
    def answers(self, pending: Any, counted: CallCounts | None = None) -> dict[int, Any]: ...
    def answered(self, pending: Any, timeout: float) -> dict[int, Any]: ...
    def replace(self, member: int, arguments: tuple[Any, ...]) -> None: ...
    def kill(self) -> None: ...


class NoneLeft(WorkerDied):
    """All replicas have died; they can be replaced."""


class EngineFleet:
    """Replicas `engine-0`, `engine-1`, ... A sample depends on its noise key, never on the replica that drew it.

    If a replica's process dies while sampling, the others draw its share from the same noise, so the samples are the
    same as the dead replica's would have been. `replace_dead` puts a new process in its place.
    """

    def __init__(self, processes: Processes, assignments: Sequence[EngineAssignment], *, restarts: int = 0) -> None:
        """`restarts`: how often a replica may be restarted without a completed step in between."""
        self.processes = processes
        self.assignments = list(assignments)
        # Called when no replica serves any more; must replace all dead ones and update their weights.
        self.on_lost: Callable[[], None] | None = None
        self._allowed = restarts
        self._changing = threading.Lock()
        self._shares = PrefixRouter()
        self._started = [1] * len(self.assignments)  # processes started so far, per replica
        self._restarts: dict[int, int] = {}  # per replica, since the last completed step
        self._dead: dict[int, CorerlError] = {}  # not replaced yet
        self._without_weights: set[int] = set()  # dead replicas, and their replacements until an update
        self._failure: CorerlError | None = None  # why all processes were killed; later deaths follow from it

    def start(self) -> Future[None]:
        """Construct all replicas; the result is there when they are ready."""
        processes = self.processes
        constructing = processes.construct([(assignment,) for assignment in self.assignments])

        def wait() -> None:
            processes.wait(constructing)

        return Future(processes, lambda timeout: processes.ready(constructing, timeout), wait)

    def __len__(self) -> int:
        return len(self.assignments)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(assignment.context.name for assignment in self.assignments)

    @property
    def receivers(self) -> tuple[str, ...]:
        """The engine name of each weight receiver, by index; an engine with several receivers is repeated."""
        return tuple(each.context.name for each in self.assignments for _ in range(each.context.bundles))

    # ---- sampling ---------------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest, told: Counted | None = None) -> Generation:
        """Complete the rows, in the request's order, spread over the replicas by `PrefixRouter`. Call it in the thread
        that updates weights: if no replica is left, it starts new ones. `told` hears every few seconds how many rows
        have ended, and how many there are. Raises a replica's own error, or the cause of its death once restarts are
        used up."""
        while not (serving := self._serving):
            self.ensure_serving()
        return self._generate(request, serving, self.generate, told)

    def generate_aside(self, request: GenerateRequest, told: Counted | None = None) -> Generation:
        """Like `generate`, for any other thread. Raises NoneLeft if no replica is left."""
        if not (serving := self._serving):
            raise NoneLeft(self._loss.message)
        return self._generate(request, serving, self.generate_aside, told)

    def _generate(
        self,
        request: GenerateRequest,
        serving: Sequence[int],
        again: Callable[[GenerateRequest], Generation],
        told: Counted | None,
    ) -> Generation:
        rows = self._shares.divide(request, serving)
        shares = {each: request.take(own) if len(rows) > 1 else request for each, own in rows.items()}
        with self._shares.drawing({replica: len(share) for replica, share in shares.items()}):
            done = self._ask(
                "generate", {replica: (share,) for replica, share in shares.items()}, _summed(shares, told)
            )
        if len(self) > 1:
            for replica, generation in done.items():
                self._shares.drew(replica, shares[replica], generation)
        return in_order(
            request, [(rows[each], done[each] if each in done else again(share)) for each, share in shares.items()]
        )

    def draw(self, replica: int, request: GenerateRequest) -> Generation | None:
        """Draw from one replica, in any thread; None if it died."""
        with self._shares.drawing({replica: len(request)}):
            generation: Generation | None = self._ask("generate", {replica: (request,)}).get(replica)
        return generation

    def serves(self, replica: int) -> bool:
        """Whether the replica is alive and has weights, as far as is known."""
        return replica not in self._without_weights

    @property
    def _serving(self) -> list[int]:
        return [replica for replica in range(len(self)) if self.serves(replica)]

    def pause(self) -> None:
        """Stop generating; until `resume`, every request is answered at once, unfinished. Returns when nothing is being
        generated. Each process needs a thread for this besides those that generate."""
        self._ask_all("pause")

    def resume(self) -> None:
        self._ask_all("resume")

    # ---- deaths -----------------------------------------------------------------------------------------------------

    @property
    def dead(self) -> bool:
        """Whether any dead replica is not replaced yet."""
        return bool(self._dead)

    def ensure_serving(self) -> None:
        """Start new replicas after all have died. Call it in the thread that updates weights."""
        if self.on_lost is None:
            raise self._loss
        self.on_lost()

    def replace_dead(self) -> dict[str, CorerlError]:
        """`replace` all dead replicas; returns the cause of each death, by name."""
        with self._changing:
            died = {self.names[replica]: error for replica, error in self._dead.items()}
        self.replace(died)
        return died

    def replace(self, failed: Mapping[str, CorerlError]) -> None:
        """Start new processes in place of these engines, dead or alive; `failed` maps each name to the reason. They
        serve once an update has reached them; a failed start is retried. Raises the error of an engine whose restarts
        since the last completed step are used up.
        """
        replicas = {self.names.index(name): error for name, error in failed.items()}
        for replica, error in replicas.items():
            self._require_allowed(replica, error)
        for replica, error in replicas.items():
            failure = self._start_anew(replica, error)
            while failure is not None:
                self._require_allowed(replica, failure)
                failure = self._start_anew(replica, failure)

    def _start_anew(self, replica: int, died_of: CorerlError) -> CorerlError | None:
        """Start a new process in place of a replica's; returns why it did not start, or None."""
        with self._changing:
            self._without_weights.add(replica)
            self._dead[replica] = died_of  # it gets no calls until it is ready
            self._restarts[replica] = self._restarts.get(replica, 0) + 1
            self._started[replica] += 1  # before the old process ends: later reports of its death are outdated
        try:
            self.processes.replace(replica, (self.assignments[replica],))
        except CorerlError as error:
            return error
        with self._changing:
            self._dead.pop(replica, None)
        return None

    def leave_out(self, failed: Mapping[str, CorerlError]) -> None:
        """Send no more calls to these hanging or failing engines until they are replaced."""
        with self._changing:
            self._dead |= {self.names.index(name): error for name, error in failed.items()}

    def lost_weights(self, names: Iterable[str]) -> None:
        """Note that an update did not reach these engines: they serve nothing until one does."""
        with self._changing:
            self._without_weights |= {self.names.index(name) for name in names}

    def step_completed(self) -> None:
        """Reset the count of restarts."""
        self._restarts.clear()

    @property
    def _loss(self) -> CorerlError:
        return next(
            iter(self._dead.values()),
            EngineFailed("no engine has weights to generate with; update the engines' weights"),
        )

    def _require_allowed(self, replica: int, error: CorerlError) -> None:
        """Kill all processes and raise `error` if the replica's restarts are used up."""
        if self._failure is not None:
            raise self._failure
        restarts = self._restarts.get(replica, 0)
        if restarts < self._allowed:
            return
        self.processes.kill()
        if restarts:
            error.add_note(
                f"the engine had already been restarted {restarts} time{'s' * (restarts > 1)} (rollout.restarts)"
            )
        raise error

    def _ask(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        counted: CallCounts | None = None,
    ) -> dict[int, Any]:
        """Return the answers of the live replicas; note which ones died. On any other failure, or when a dead replica's
        restarts are used up, kill all processes and raise the error."""
        asked = tuple(self._started)
        answers = self.processes.answers(self.processes.start_some(method, arguments), counted)
        failed = {replica: answer for replica, answer in answers.items() if isinstance(answer, CorerlError)}
        for replica, error in failed.items():
            if not isinstance(error, WorkerDied):
                self._failure = self._failure or error
                self.processes.kill()
                raise error
            with self._changing:
                if self._started[replica] != asked[replica]:
                    continue  # replaced meanwhile: this death is of its old process
                self._dead[replica] = error
                self._without_weights.add(replica)
            self._require_allowed(replica, error)
        return {replica: answer for replica, answer in answers.items() if replica not in failed}

    def _ask_all(self, method: str, *args: Any) -> dict[int, Any]:
        return self._ask(method, dict.fromkeys((each for each in range(len(self)) if each not in self._dead), args))

    # ---- weights and memory -----------------------------------------------------------------------------------------

    def receive(self, manifest: Manifest, version: int, address: Address) -> Any:
        """Start `receive` on the engines; call it together with the group's `update_weights`, and then `received`."""
        return self.processes.start("receive", manifest, version, address)

    def received(self, pending: Any, timeout: float) -> dict[str, Received]:
        """The results of the engines that answered within `timeout` seconds; a death counts as an answer."""
        return self._fared(self.processes.answered(pending, timeout))

    def weight_sums(self, dtype: str) -> dict[str, Mapping[str, int] | None]:
        """Each live engine's `Engine.weight_sums`, by name."""
        return {self.names[replica]: sums for replica, sums in self._ask_all("weight_sums", dtype).items()}

    def sleep(self) -> int:
        """Free the weights' memory; returns bytes. Nothing is served until `wake_up` and a weight update."""
        return sum(self._ask_all("sleep").values())

    def wake_up(self) -> int:
        """Reallocate the weights' memory; returns bytes. Idempotent."""
        return sum(self._ask_all("wake_up").values())

    def close(self) -> None:
        """End the replicas, even while they generate or hang."""
        try:
            for method in ("pause", "close"):  # a replica that dies here has ended too
                self.processes.answered(self.processes.start(method), CLOSE_SECONDS)
        finally:
            self.processes.kill()

    def _fared(self, answers: Mapping[int, Any]) -> dict[str, Received]:
        self._shares.forget()
        fared = {replica: _received(answer) for replica, answer in answers.items()}
        failed = {replica for replica, each in fared.items() if each.error}
        with self._changing:
            self._without_weights = (self._without_weights - fared.keys()) | failed
            for replica in fared.keys() - failed:
                self._dead.pop(replica, None)  # a death reported for an earlier process
        return {self.names[replica]: each for replica, each in fared.items()}


def _summed(shares: Mapping[int, GenerateRequest], told: Counted | None) -> CallCounts | None:
    """A function that gets, of replicas still drawing their shares, how many rows have ended, and tells `told` of all
    rows."""
    if told is None:
        return None
    rows = sum(map(len, shares.values()))
    known = dict.fromkeys(shares, 0)  # what was said last, by a replica that is too busy to say more

    def counted(drawing: Mapping[int, int | None]) -> None:
        for replica, share in shares.items():
            ended = drawing.get(replica, len(share))
            known[replica] = known[replica] if ended is None else ended
        told(sum(known.values()), rows)

    return counted


def _received(answer: Received | CorerlError) -> Received:
    if isinstance(answer, CorerlError):
        return Received(version=-1, bytes=0, error=answer.message, died=isinstance(answer, WorkerDied))
    return answer
