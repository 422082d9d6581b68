"""What a run's directory says of the run, read as its files grow: metrics, samples, notices, config, and its lock."""

from __future__ import annotations

import json
import math
import os
import threading
import tomllib
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from attrs import define, field, frozen

from corerl.config import CONFIG_FILE
from corerl.observability import METRICS_FILE, NOTICES_FILE, SAMPLES_FILE
from corerl_page.timeline import TRACE_FILE, Timeline

ROLLOUTS_FILE, VERSIONS_FILE = "rollouts.jsonl", "versions.json"
FILES = (METRICS_FILE, SAMPLES_FILE, ROLLOUTS_FILE, NOTICES_FILE, TRACE_FILE, CONFIG_FILE)


@define(eq=False)
class Tail:
    """The complete lines of a file that grows. A file that is replaced or cut is read from its start again."""

    path: Path
    _inode: int = 0
    _place: int = 0

    @contextmanager
    def new(self) -> Iterator[tuple[bool, Iterator[tuple[int, bytes]]]]:
        """Whether all lines before are void, and (offset, line) for each that has come since the last call. A line is
        read when it is asked for, as the file may be larger than memory, and has come once the next one is."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            void, self._inode, self._place = self._inode != 0, 0, 0
            yield void, iter(())
            return
        with file:
            stat = os.fstat(file.fileno())
            void = stat.st_ino != self._inode or stat.st_size < self._place
            if void:
                self._inode, self._place = stat.st_ino, 0
            file.seek(self._place)
            yield void, self._lines(file)

    def _lines(self, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        for line in file:
            if not line.endswith(b"\n"):  # not yet whole
                return
            yield self._place, line
            self._place += len(line)


@frozen(kw_only=True)
class Summary:
    """A sample as a line of a list shows it."""

    id: int  # its place in the file
    step: int
    kind: str
    number: int  # among the samples that the file has of its step and kind
    prompt: str  # the beginning
    response: str  # the beginning
    reward: float | None
    tokens: int | None = None  # the rest is None where the file is samples.jsonl
    truncated: bool | None = None
    ended: bool | None = None
    diff: float | None = None  # mean |trainer - engine| of its log-probs
    largest: float | None = None
    versions: tuple[int, ...] = ()
    engines: tuple[int, ...] = ()  # that sampled it
    shaped: float | None = None  # its reward after penalties
    advantage: float | None = None  # the mean of its tokens'


SHOWN = 160  # characters of a text in a list
FAR = 0.1  # mean |trainer - engine| above which a sample counts as far; rounding makes 1e-7 to 0.06


RECENT = 32  # steps, counted for each kind, whose summaries stay in memory: 1 kB each, of which a run has millions


class Gone(ValueError):
    """A sample whose line is no longer there: the run has replaced its step."""


class Samples:
    """The samples of one file, by step and kind. It holds where the line of each begins, the differences of engines by
    step, and the summaries of the steps that have come or were asked for last. May be called from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail = Tail(path)
        self._lock = threading.Lock()
        self._places: dict[int, dict[str, array[int]]] = {}
        self._recent: dict[tuple[int, str], list[Summary]] = {}  # the one that is used last comes last
        self._diffs: dict[int, dict[int, tuple[float, int]]] = {}  # step -> engine -> sum over tokens, and how many

    @property
    def steps(self) -> list[int]:
        with self._lock:
            return sorted(self._places)

    def counts(self, step: int) -> dict[str, int]:
        """How many samples of each kind a step has."""
        with self._lock:
            return {kind: len(places) for kind, places in self._places.get(step, {}).items()}

    def update(self) -> None:
        with self._lock, self._tail.new() as (void, lines):
            if void:
                for known in (self._places, self._recent, self._diffs):
                    known.clear()
            for offset, line in lines:
                self._add(json.loads(_head(line)), offset)

    def _add(self, record: Mapping[str, Any], offset: int) -> None:
        step, kind = key = record["step"], record.get("kind", "sampled")
        places = self._places.setdefault(step, {}).setdefault(kind, array("q"))
        summary = _summary(record, place=offset, number=len(places))
        places.append(offset)
        if len(places) == 1:
            self._keep(key, [])
        if key in self._recent:  # else it is read again when it is asked for
            self._recent[key].append(summary)
        if kind == "sampled" and summary.diff is not None and summary.tokens:
            sums = self._diffs.setdefault(step, {})
            for engine in summary.engines:
                total, tokens = sums.get(engine, (0.0, 0))
                sums[engine] = total + summary.diff * summary.tokens, tokens + summary.tokens

    def _keep(self, key: tuple[int, str], summaries: list[Summary]) -> None:
        self._recent[key] = summaries
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]

    def of(self, step: int, kind: str) -> list[Summary]:
        """The samples of one step and kind, in the file's order."""
        with self._lock:
            found, key = self._recent.pop((step, kind), None), (step, kind)
            if found is None:
                places = enumerate(self._places.get(step, {}).get(kind, ()))
                found = [_summary(self._begun(place), place=place, number=number) for number, place in places]
            self._keep(key, found)
            return list(found)

    def diffs(self) -> dict[int, dict[int, float]]:
        """Of each step, the mean |trainer - engine| over the tokens of each engine where it is known."""
        with self._lock:
            return {
                step: {engine: total / tokens for engine, (total, tokens) in sums.items()}
                for step, sums in self._diffs.items()
            }

    def record(self, place: int) -> dict[str, Any]:
        """Raises Gone if no line begins there."""
        record: dict[str, Any] = json.loads(self._line(place))
        return record

    def _begun(self, place: int) -> dict[str, Any]:
        """The record without its rows."""
        record: dict[str, Any] = json.loads(_head(self._line(place)))
        return record

    def _line(self, place: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(max(place - 1, 0))
            begins = place == 0 or file.read(1) == b"\n"
            line = file.readline()
        if not begins or not line.endswith(b"\n"):
            raise Gone(f"{self.path.name} has no sample at {place}; the run may have replaced its step")
        return line

    def matching(self, summaries: list[Summary], text: str) -> list[Summary]:
        """Those whose prompt, response or answer has the text, in any case."""
        wanted, found = text.casefold(), []
        for summary in summaries:
            record = self._begun(summary.id)
            if any(wanted in str(record.get(name, "")).casefold() for name in ("prompt", "response", "answer")):
                found.append(summary)
        return found


def _head(line: bytes) -> bytes:
    """A line without its `rows`, which come last and are nearly all of it: a summary needs none of them."""
    head, rows, _ = line.partition(b', "rows": [')  # within a text quotes are escaped
    return head + b"}" if rows else line


def _summary(record: Mapping[str, Any], *, place: int, number: int) -> Summary:
    mean, largest = record.get("diff", (None, None))
    return Summary(
        id=place,
        step=record["step"],
        kind=record.get("kind", "sampled"),
        number=record.get("number", number),
        prompt=str(record.get("prompt", ""))[:SHOWN],
        response=str(record.get("response", ""))[:SHOWN],
        reward=finite(record.get("reward")),
        tokens=record.get("tokens"),
        truncated=record.get("truncated"),
        ended=record.get("ended"),
        diff=mean,
        largest=largest,
        versions=tuple(record.get("versions", ())),
        engines=tuple(record.get("engines", ())),
        shaped=record.get("shaped"),
        advantage=record.get("advantage"),
    )


@define(eq=False)
class Run:
    """One run's directory. Methods may be called from several threads."""

    path: Path
    name: str
    _lock: threading.Lock = field(factory=threading.Lock, init=False)  # of `_metrics`
    _metrics: dict[str, dict[int, float | None]] = field(factory=dict, init=False)

    @cached_property
    def _metrics_tail(self) -> Tail:
        return Tail(self.path / METRICS_FILE)

    @cached_property
    def _rollouts(self) -> Samples:
        return Samples(self.path / ROLLOUTS_FILE)

    @cached_property
    def _shown(self) -> Samples:
        return Samples(self.path / SAMPLES_FILE)

    @cached_property
    def timeline(self) -> Timeline:
        return Timeline(Tail(self.path / TRACE_FILE))

    def state(self) -> dict[str, Any]:
        """`changed` differs once any file has grown."""
        sizes = {name: (self.path / name).stat().st_size for name in FILES if (self.path / name).exists()}
        with self._lock:
            self._update_metrics()
            # A step's metrics have its number, those of an evaluation how many steps were done before.
            ended = {step + 1 for step in self._metrics.get("time/step", {})}
            done = max({0, *ended, *self._metrics.get("eval/reward", {})})
        return {
            "name": self.name,
            "path": str(self.path),
            "running": is_running(self.path),
            "steps": self.config().get("run", {}).get("steps"),
            "done": done,
            "changed": "-".join(map(str, sizes.values())),
            "files": sizes,
        }

    def config(self) -> dict[str, Any]:
        try:
            return tomllib.loads((self.path / CONFIG_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # such as a directory that has metrics alone
            return {}

    def versions(self) -> dict[str, str]:
        """Of what was installed as the run began; empty if the extension has not written them."""
        try:
            found: dict[str, str] = json.loads((self.path / VERSIONS_FILE).read_text(encoding="utf-8"))
            return found
        except (OSError, ValueError):
            return {}

    def names(self) -> list[str]:
        """Of all metrics."""
        with self._lock:
            self._update_metrics()
            return sorted(self._metrics)

    def metrics(self, names: Collection[str]) -> dict[str, dict[int, float | None]]:
        """The value of each step of these metrics; None where it was not finite."""
        with self._lock:
            self._update_metrics()
            return {name: dict(self._metrics[name]) for name in names if name in self._metrics}

    def _update_metrics(self) -> None:
        with self._metrics_tail.new() as (void, lines):
            if void:
                self._metrics = {}
            for _, line in lines:
                record = json.loads(line)
                step = record.pop("step")
                for name, value in record.items():
                    self._metrics.setdefault(name, {})[step] = value

    def samples(self, step: int) -> Samples:
        """The file that has most to say of the step: rollouts.jsonl, or samples.jsonl where that has more samples."""
        self._update_samples()
        return self._of(step)

    def _update_samples(self) -> None:
        self._rollouts.update()
        self._shown.update()

    def _of(self, step: int) -> Samples:
        has_tokens = "sampled" in self._rollouts.counts(step)
        return self._rollouts if has_tokens or not self._shown.counts(step) else self._shown

    def sampled(self, steps: int) -> list[Summary]:
        """Those of the last `steps` steps that have samples with their tokens."""
        self._update_samples()
        having = [step for step in self._rollouts.steps if "sampled" in self._rollouts.counts(step)]
        return [each for step in having[-steps:] for each in self._rollouts.of(step, "sampled")]

    def diffs(self) -> dict[int, dict[int, float]]:
        """Of each step, how far each engine's tokens are from the trainer."""
        return self._rollouts.diffs()

    def steps(self) -> list[dict[str, Any]]:
        """The steps that have samples, with how many of each kind."""
        self._update_samples()
        steps = sorted({*self._rollouts.steps, *self._shown.steps})
        return [{"step": step, "kinds": self._of(step).counts(step)} for step in steps]

    def notices(self) -> list[dict[str, Any]]:
        with Tail(self.path / NOTICES_FILE).new() as (_, lines):
            return [json.loads(line) for _, line in lines]


@frozen(kw_only=True)
class OfEngine:
    """What one engine has sampled of some samples; of one by several, each engine counts it."""

    engine: int
    samples: int
    diffs: int  # of these, how many have a difference from the trainer
    tokens: int  # that these have
    diff: float | None  # the mean over these tokens, as in rollout/logprob_diff
    far: int  # of these samples, how many are above FAR
    cut_off: int


def mean_diff(found: Iterable[Summary]) -> float | None:
    """Mean |trainer - engine| over all tokens of those where it is known; None if it is of none."""
    known = [(each.diff, each.tokens) for each in found if each.diff is not None and each.tokens]
    return sum(diff * tokens for diff, tokens in known) / sum(tokens for _, tokens in known) if known else None


def by_engine(found: Iterable[Summary]) -> list[OfEngine]:
    """Those whose engine is known, by its number."""
    own: dict[int, list[Summary]] = {}
    for each in found:
        for engine in each.engines:
            own.setdefault(engine, []).append(each)
    sums = []
    for engine, members in sorted(own.items()):
        diffs = [(each.diff, each.tokens or 0) for each in members if each.diff is not None]
        sums.append(
            OfEngine(
                engine=engine,
                samples=len(members),
                diffs=len(diffs),
                tokens=sum(tokens for _, tokens in diffs),
                diff=mean_diff(members),
                far=sum(diff > FAR for diff, _ in diffs),
                cut_off=sum(bool(each.truncated) for each in members),
            )
        )
    return sums


def finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def is_running(run_dir: Path) -> bool:
    """Whether a process of this machine holds the run's lock. It is not tried: a run that starts in that moment would
    find it taken."""
    try:
        stat, locks = (run_dir / ".lock").stat(), Path("/proc/locks").read_text()
    except OSError:
        return False
    place = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    return any(place in line.split() for line in locks.splitlines())


def runs_of(paths: list[Path]) -> list[Run]:
    """With short names that differ."""
    names = [path.resolve().name or str(path) for path in paths]
    if len(set(names)) < len(names):
        common = os.path.commonpath([path.resolve() for path in paths])
        names = [os.path.relpath(path.resolve(), common) for path in paths]
    return [Run(path, name) for path, name in zip(paths, names, strict=True)]
