"""A fleet whose processes are fakes that answer as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from corerl.config.schema import ModelConfig
from corerl.engines.base import EngineContext, GenerateRequest, Generation
from corerl.engines.fleet import EngineFleet
from corerl.engines.service import EngineAssignment
from corerl.errors import CorerlError, EngineFailed
from corerl.event_loop import EventLoop
from corerl.plugin.origins import origins_of
from corerl.plugin.registry import Kind, load
from tests.engines.services import generation_of, request_of

REQUEST = request_of([[0], [1, 2], [3], [4, 5, 6, 7], [8, 9]], first_key=7, max_tokens=6, stop_tokens=(2,))


def assigned(count: int, *, bundles: int = 1) -> list[EngineAssignment]:
    return [
        EngineAssignment(
            engine="fake",
            origins=origins_of((Kind.ENGINES, load(Kind.ENGINES, "fake"))),
            model=ModelConfig(),
            options={},
            context=EngineContext(
                name=f"engine-{index}", index=index, device="cpu", precision="float32", bundles=bundles
            ),
        )
        for index in range(count)
    ]


def fleet_of(processes: Any, loop: EventLoop, replicas: int, **settings: Any) -> EngineFleet:
    """On as much of a group of processes as is asked."""
    fleet = EngineFleet(processes, assigned(replicas), loop, **settings)
    fleet.updated(fleet.names)
    return fleet


def sample(fleet: EngineFleet, request: GenerateRequest) -> Generation:
    return fleet.loop.run(fleet.generate(request))


def same(a: Generation, b: Generation) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("tokens", "offsets", "logprobs", "versions", "truncated")
    )


class Group:
    """Processes that answer any call with `answers`, by replica; whoever waits for another one waits in vain."""

    def __init__(self, answers: Mapping[int, Any], *, failing_starts: int = 0) -> None:
        self._answers = answers
        self._failing_starts = failing_starts
        self.log: list[str] = []

    def construct(self, arguments: Any) -> list[int]:
        return list(self._answers)

    def start(self, method: str) -> list[int]:
        self.log.append(method)
        return []

    def start_some(self, method: str, arguments: Any) -> list[int]:
        return list(arguments)

    def ready(self, pending: Any, timeout: float) -> bool:
        return True

    def answers(self, pending: list[int], *, timeout: float | None = None, on_ended: Any = None) -> dict[int, Any]:
        if timeout is not None:
            assert timeout < 3600
            return {replica: each for replica, each in self._answers.items() if isinstance(each, CorerlError)}
        self.log.append("wait for all")
        assert self._answers.keys() >= set(pending), "waited for in vain"
        return {replica: self._answers[replica] for replica in pending}

    def replace(self, replica: int, arguments: Any) -> None:
        self.log.append(f"replace {replica}")
        if len(self.log) <= self._failing_starts:
            raise EngineFailed("engine-0: start: no memory")

    def kill(self) -> None:
        self.log.append("kill")


def respond(request: GenerateRequest, rows: int | None = None) -> Generation:
    """The first `rows` rows in full, the others not at all."""
    whole = np.arange(len(request)) < (len(request) if rows is None else rows)
    tokens = [[key % 16] if done else [] for key, done in zip(request.noise_keys.tolist(), whole, strict=True)]
    return generation_of(tokens, unfinished=~whole)


class Scripted:
    """Replicas that answer a token for each row, its noise key modulo 16, as `script` says: a call is answered with
    what the function at its place makes of the request, later ones in full."""

    def __init__(self, *script: Callable[[GenerateRequest], Any]) -> None:
        self.script = list(script)
        self.asked: list[tuple[int, list[int], list[int]]] = []  # replica, noise keys, tokens of responses so far
        self.log: list[str] = []
        self.paused = threading.Event()
        self._lock = threading.Lock()

    def start_some(self, method: str, arguments: Any) -> Any:
        return method, arguments

    def answers(self, pending: Any, *, timeout: float | None = None, on_ended: Any = None) -> dict[int, Any]:
        method, arguments = pending
        if method != "generate":
            self.log.append(method)
            if method == "pause":
                self.paused.set()
            return dict.fromkeys(arguments, 0)
        ((replica, (request,)),) = arguments.items()
        if on_ended is not None:
            on_ended(1)
        with self._lock:
            self.asked.append((replica, request.noise_keys.tolist(), request.response_lengths.tolist()))
            next_answer = self.script.pop(0) if self.script else respond
        return {replica: next_answer(request)}

    def replace(self, replica: int, arguments: Any) -> None:
        self.log.append(f"replace {replica}")

    def kill(self) -> None:
        self.log.append("kill")


class Sized(Scripted):
    """As many replicas as are wanted, in slots that are their numbers. `gates` hold up calls of some."""

    def __init__(self, size: int, *script: Callable[[GenerateRequest], Any]) -> None:
        super().__init__(*script)
        self.size = size
        self.gates: dict[int, threading.Event] = {}
        self.sampling = threading.Semaphore(0)  # calls that a gate has held up
        self.error: CorerlError | None = None  # of the next start

    def start_some(self, method: str, arguments: Any) -> Any:
        assert all(replica < self.size for replica in arguments), "one that is not there is asked"
        return method, arguments

    def answers(self, pending: Any, *, timeout: float | None = None, on_ended: Any = None) -> dict[int, Any]:
        method, arguments = pending
        if method == "generate":
            for gate in [gate for replica, gate in self.gates.items() if replica in arguments]:
                self.sampling.release()
                assert gate.wait(60.0)
        if timeout is None:
            return super().answers(pending) if arguments else {}
        self.log.append(f"{method} {sorted(arguments)}")
        if method == "pause":
            self.paused.set()
        return dict.fromkeys(arguments)

    def grow(self, names: Any, slots: Any, arguments: Any) -> None:
        self.log.append(f"grow {names} in {slots}")
        assert [assignment.context.name for (assignment,) in arguments] == names
        if self.error is not None:
            raise self.error
        self.size += len(names)

    def shrink(self, count: int) -> None:
        self.log.append(f"shrink {count}")
        self.size -= count

    def reassign(self, slots: Sequence[Any]) -> None:
        self.log.append(f"reassign in {slots}")
