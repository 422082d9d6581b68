"""A fleet of engines in this process, which answer at the pace that a test sets, die and are replaced."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np

from corerl.driver.sampling import in_scoring_thread
from corerl.engines.base import UNLIMITED, GenerateRequest, Generation, Received
from corerl.engines.fleet import EngineFleet
from corerl.errors import CorerlError, WorkerDied
from corerl.event_loop import EventLoop
from corerl.ops.noise import hash_keys
from corerl.rollout.rewards import Reward
from corerl.rollout.scored import ScoredRollout
from corerl.rollout.scoring import AsyncScorer, RewardScorer, Scorer, Scores
from corerl.rollout.source import Policies, Source
from corerl.types import FloatArray, IntArray
from tests.engines.services import serve

T = TypeVar("T")

LIMIT = 60.0  # seconds, against hangs
END = 2  # the token that ends a response


class Engines:
    """The processes of `fleet`, as its group sees them: a replica that is alive answers each call at once, unless a
    test's `draw` does otherwise. Tokens are a function of the row's noise and of their place, log-probs of token and
    version."""

    def __init__(self, replicas: int = 1, *, calls: int = 12, width: int = UNLIMITED, restarts: int = 9) -> None:
        self.version = 0  # of the weights that the engines hold
        self.policy = 0  # others draw other tokens
        self.keys: list[int] = []  # noise of all rows that were begun
        self.log: list[str] = []  # what else was asked of all
        self.deaths = 0  # of those that are asked to generate next
        self.failure: CorerlError | None = None  # of all that are asked to generate
        self.changing = threading.Condition()
        self.paused = False
        self._killed = False
        self._ends: dict[int, WorkerDied] = {}  # of the replicas that have died
        assignments: Any = [
            SimpleNamespace(context=SimpleNamespace(name=f"engine-{index}", index=index, bundles=1))
            for index in range(replicas)
        ]
        self.fleet = EngineFleet(
            cast(Any, self), assignments, EventLoop("rollout"), calls=calls, width=lambda _: width, restarts=restarts
        )
        self.fleet.updated(self.fleet.names)

    # ---- what tests do ----------------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work of the fleet's loop, in which no engine is to die."""
        return serve(self.fleet, work, self._none_dies)

    def next(self, source: Source) -> ScoredRollout:
        """The next step; if all replicas die, others are put in their place."""
        scored = self._next(source)
        assert scored is not None
        return scored

    def rest(self, source: Source) -> list[ScoredRollout]:
        """The steps that a source still has, without updates in between."""
        return list(iter(lambda: self._next(source), None))

    def trained_on(self, source: Source) -> Iterator[ScoredRollout]:
        """The batches of a loop whose every step makes one version."""
        self.update(source, 0)
        while (scored := self._next(source)) is not None:
            yield scored
            self.update(source, scored.step + 1)
        source.close()

    def _next(self, source: Source) -> ScoredRollout | None:
        return serve(self.fleet, source.next(), lambda: self.update(source, self.version))

    def _none_dies(self) -> None:
        raise AssertionError("all engines have died")

    def take_weights(self, version: int) -> None:
        nothing: Any = None  # such engines need neither a manifest nor an address
        received = self.fleet.received(self.fleet.receive(nothing, version, nothing), LIMIT)
        assert not any(each.error for each in received.values())
        self.fleet.updated(received)

    def update(self, source: Source, version: int, *, repeats: tuple[int, ...] = ()) -> None:
        """As the run does it."""
        with source.updating(Policies(version=version, repeats=repeats)):
            self.fleet.replace(self.fleet.deaths)
            self.take_weights(version)

    def die(self) -> None:
        """All at once, while they generate too."""
        with self.changing:
            for replica in range(len(self)):
                self._ends.setdefault(replica, WorkerDied(f"engine-{replica}: its process died"))
            self.changing.notify_all()

    def settle(self) -> None:
        """Wait until nothing goes on any more in the fleet's loop."""

        async def hanging() -> list[str]:
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                _, hanging = await asyncio.wait(others, timeout=LIMIT)
                if hanging:
                    return [str(task) for task in hanging]
            return []

        assert self.fleet.loop.run(hanging()) == []

    def close(self) -> None:
        """As the end of a run, whose sources have been closed: no task is left once the engines have ended."""
        self.kill()
        try:
            self.settle()
        finally:
            self.fleet.loop.close()

    # ---- what replicas do -------------------------------------------------------------------------------------------

    def draw(self, replica: int, request: GenerateRequest) -> Generation:
        """The answer to one call, in a thread of its own."""
        return self.drawn(request)

    def drawn(self, request: GenerateRequest, most: int = UNLIMITED) -> Generation:
        """At most so many tokens for each row."""
        rows = [
            row_of(int(key) ^ self.policy, int(begun), int(min(most, left)))
            for key, begun, left in zip(request.noise_keys, request.response_lengths, request.left, strict=True)
        ]
        tokens, sizes = np.concatenate([np.array(row, np.int64) for row in rows]), np.array([len(row) for row in rows])
        stopped = np.array([row[-1:] == [END] for row in rows])
        whole = (sizes == request.left) & ~stopped
        versions = np.full(len(tokens), self.version)
        return Generation(
            tokens=tokens,
            offsets=np.concatenate([[0], np.cumsum(sizes)]),
            logprobs=logprobs(tokens, versions),
            versions=versions,
            truncated=whole,
            unfinished=~whole & ~stopped,
        )

    def _generate(self, replica: int, request: GenerateRequest) -> Generation:
        with self.changing:
            if self.deaths and replica not in self._ends:
                self.deaths -= 1
                self._ends[replica] = WorkerDied(f"engine-{replica}: its process died during generate")
            self._require_well(replica)
            if self.paused:
                return Generation.nothing(request)
            self.keys += request.noise_keys[request.response_lengths == 0].tolist()
        drawn = self.draw(replica, request)
        self._require_well(replica)
        return drawn

    def _require_well(self, replica: int) -> None:
        if (error := self.failure or self._ends.get(replica)) is not None:
            raise error

    def _answer(self, method: str, replica: int, *args: Any) -> Any:
        if method == "generate":
            return self._generate(replica, *args)
        with self.changing:
            if replica in self._ends:
                raise self._ends[replica]
            if method == "receive":
                _, self.version, _ = args
                return Received(bytes=8)
            if method in ("pause", "resume"):
                self.paused = method == "pause"
                self.changing.notify_all()
                return None
        raise AssertionError(f"nobody should call {method}")

    # ---- as `Processes` ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.fleet)

    def start(self, method: str, *args: Any) -> Any:
        return self.start_some(method, dict.fromkeys(range(len(self)), args))

    def start_some(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Any:
        if self._killed:
            raise WorkerDied("engine-0 and its group have ended")
        if method != "generate":
            self.log.append(method)
        return method, arguments

    def ready(self, pending: Any, timeout: float) -> bool:
        return True

    def wait(self, pending: Any) -> list[Any]:
        return list(self.answers(pending).values())

    def answers(self, pending: Any, *, timeout: float | None = None, on_ended: Any = None) -> dict[int, Any]:
        """Without any time, that of the first replica."""
        method, arguments = pending
        if timeout == 0.0:
            arguments = {0: arguments[0]}
        answers: dict[int, Any] = {}
        for replica, args in arguments.items():
            try:
                answers[replica] = self._answer(method, replica, *args)
            except CorerlError as error:
                answers[replica] = error
        return answers

    def replace(self, member: int, arguments: tuple[Any, ...]) -> None:
        self.log.append(f"replace {member}")
        with self.changing:
            self._ends.pop(member, None)

    def kill(self) -> None:
        self._killed = True
        self.die()

    def wait_for_pause(self) -> None:
        """Until the engines are paused, or end."""
        with self.changing:
            assert self.changing.wait_for(lambda: self.paused or bool(self._ends), LIMIT)


def row_of(key: int, length: int, most: int) -> list[int]:
    """At most so many tokens of a response, from its token number `length` on."""
    row: list[int] = []
    while len(row) < most and row[-1:] != [END]:
        drawn = int(hash_keys(key, length + len(row))[0] % 16)
        row.append(drawn if drawn not in (0, 1, 3) else 9)
    return row


def logprobs(tokens: IntArray, versions: IntArray) -> FloatArray:
    return -(tokens + versions / 64).astype(np.float32)


def aside(scorer: Scorer | Reward) -> AsyncScorer:
    """Scores in threads of its own."""
    return AsyncScorer(RewardScorer(scorer) if isinstance(scorer, Reward) else scorer, in_scoring_thread)


def at_once(scorer: Scorer | Reward) -> AsyncScorer:
    """Scores in the loop's thread, which does nothing else meanwhile."""

    async def call(score: Callable[[], Scores]) -> Scores:
        return score()

    return AsyncScorer(RewardScorer(scorer) if isinstance(scorer, Reward) else scorer, call)
