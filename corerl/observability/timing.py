"""Measure how many seconds each phase of a step takes, and when ranks and engines do nothing."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from corerl.plugin.events import Idle, Span

RANKS = "ranks"
SCORING = "scoring"  # the span in which rewards are computed
# Phases of the driver in which ranks work, and those in which engines get their weights or change their memory.
OF_RANKS = frozenset({"compare", "forward", "train", "update_weights", "sleep", "wake_up", "save"})
OF_WEIGHTS = frozenset({"update_weights", "hold", "sleep", "wake_up", "replace"})


class Spans:
    """Notes from when to when something is done, in any thread: `with spans("engine-0"): ...`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._numbers = itertools.count()
        self._open: dict[int, tuple[str, float]] = {}
        self._ended: list[Span] = []
        self._changing = threading.Lock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with self._changing:
            number, self._open[number] = next(self._numbers), (name, self.clock())
        try:
            yield
        finally:
            with self._changing:
                name, began = self._open.pop(number)
                self._ended.append(Span(name=name, started=began, ended=self.clock()))

    def take(self) -> list[Span]:
        """Those that have ended since the last call, and those that go on, as if they ended now."""
        with self._changing:
            now, ended = self.clock(), self._ended
            self._ended = []
            return [*ended, *(Span(name=name, started=began, ended=now) for name, began in self._open.values())]


class Phases:
    """Times phases: `with phases("rollout"): ...` adds to that name's seconds; `take()` returns and resets them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inside = 0.0  # seconds of the phases that have ended inside the current one

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase, even if it raises. A nested phase's seconds do not count for the outer one."""
        began = self._clock()
        outer, self._inside = self._inside, 0.0
        try:
            yield
        finally:
            took = self._clock() - began
            self._seconds[name] = self._seconds.get(name, 0.0) + took - self._inside
            self._inside = outer + took

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call, in order of first occurrence."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def idle(spans: Sequence[Span], began: float, ended: float, *, engines: Sequence[str]) -> list[Idle]:
    """When the ranks, which work together, and each engine did nothing between `began` and `ended`, by the clock of
    `spans`, among which those of an engine have its name. The engines are those of the step's end: one that came in
    the step is idle until then.

    Ranks do nothing without a verb, and wait for
        samples   of engines
        rewards   while no engine samples
        driver    for anything else
    An engine does nothing without a request, and no update of weights, and waits for
        longest   samples of another engine
        rewards   while no engine samples
        training  of ranks
        driver    for anything else
    """
    changes = [(began, 0, ""), (ended, 0, "")]
    for name, low, high in _joined(spans):
        low, high = max(low, began), min(high, ended)
        if low < high:
            changes += [(low, 1, name), (high, -1, name)]
    found: list[Idle] = []
    active = set[str]()
    waiting: dict[str, tuple[str, float]] = {}  # who -> for what, and since when
    for at, together in itertools.groupby(sorted(changes), key=lambda change: change[0]):
        for _, change, name in together:
            if change > 0:
                active.add(name)
            elif change < 0:
                active.remove(name)
        causes = _causes(active, engines) if at < ended else {}
        for who in (RANKS, *engines):
            cause, since = waiting.get(who, ("", at))
            if cause != causes.get(who, ""):
                if cause:
                    found.append(Idle(who=who, waits_for=cause, started=since, ended=at))
                waiting[who] = causes.get(who, ""), at
    return found


def _joined(spans: Iterable[Span]) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of spans, of which those of one name that touch are one: an engine has hundreds of requests
    at once, and what all wait for is looked at whenever this changes."""
    name, low, high = "", 0.0, 0.0
    for span in sorted(spans, key=lambda span: (span.name, span.started)):
        if span.name == name and span.started <= high:
            high = max(high, span.ended)
            continue
        if name:
            yield name, low, high
        name, low, high = span.name, span.started, span.ended
    if name:
        yield name, low, high


def idle_seconds(found: Iterable[Idle], *, engines: int) -> dict[str, float]:
    """Seconds of a step by cause, and in all: as idle/ranks/..., and as idle/engines/..., means over the engines."""
    seconds = defaultdict(float, {"idle/ranks/total": 0.0, **({"idle/engines/total": 0.0} if engines else {})})
    for each in found:
        kind, share = (RANKS, 1.0) if each.who == RANKS else ("engines", 1.0 / engines)
        for name in ("total", each.waits_for):
            seconds[f"idle/{kind}/{name}"] += share * (each.ended - each.started)
    return dict(seconds)


def _causes(active: set[str], engines: Sequence[str]) -> Mapping[str, str]:
    """What each who does nothing waits for, while these spans are open."""
    busy = active.intersection(engines)
    shared = "rewards" if SCORING in active else "driver"
    causes = {}
    if not active & OF_RANKS:
        causes[RANKS] = "samples" if busy else shared
    if not active & OF_WEIGHTS:
        cause = "longest" if busy else "training" if active & OF_RANKS else shared
        causes |= {each: cause for each in engines if each not in busy}
    return causes
