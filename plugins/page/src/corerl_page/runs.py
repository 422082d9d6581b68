"""What a run's directory says of the run, read as its files grow: metrics, samples, notices, config, and its lock."""

from __future__ import annotations

import json
import math
import os
import threading
import tomllib
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

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

    def new(self) -> tuple[bool, list[tuple[int, bytes]]]:
        """Whether all lines before are void, and (offset, line) for each that has come since the last call."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                void = stat.st_ino != self._inode or stat.st_size < self._place
                if void:
                    self._inode, self._place = stat.st_ino, 0
                file.seek(self._place)
                found = []
                for line in file:
                    if not line.endswith(b"\n"):  # not yet whole
                        break
                    found.append((self._place, line))
                    self._place += len(line)
                return void, found
        except FileNotFoundError:
            void, self._inode, self._place = self._inode != 0, 0, 0
            return void, []


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


class Samples:
    """The samples of one file, by step and kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail = Tail(path)
        self.steps: dict[int, dict[str, list[Summary]]] = {}

    def update(self) -> None:
        void, lines = self._tail.new()
        if void:
            self.steps = {}
        for offset, line in lines:
            record = json.loads(line)
            kinds = self.steps.setdefault(record["step"], {})
            found = kinds.setdefault(record.get("kind", "sampled"), [])
            found.append(_summary(record, place=offset, number=len(found)))

    def record(self, place: int) -> dict[str, Any]:
        """Raises KeyError if no line begins there."""
        with self.path.open("rb") as file:
            file.seek(max(place - 1, 0))
            if place < 0 or (place > 0 and file.read(1) != b"\n"):
                raise KeyError(place)
            line = file.readline()
        if not line.endswith(b"\n"):
            raise KeyError(place)
        record: dict[str, Any] = json.loads(line)
        return record

    def matching(self, summaries: list[Summary], text: str) -> list[Summary]:
        """Those whose prompt, response or answer has the text, in any case."""
        wanted, found = text.casefold(), []
        for summary in summaries:
            record = self.record(summary.id)
            if any(wanted in str(record.get(name, "")).casefold() for name in ("prompt", "response", "answer")):
                found.append(summary)
        return found


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
    _lock: threading.RLock = field(factory=threading.RLock, init=False)
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
        return Timeline(Tail(self.path / TRACE_FILE), threading.RLock())

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
        void, lines = self._metrics_tail.new()
        if void:
            self._metrics = {}
        for _, line in lines:
            record = json.loads(line)
            step = record.pop("step")
            for name, value in record.items():
                self._metrics.setdefault(name, {})[step] = value

    def samples(self, step: int | None = None) -> Samples:
        """The file that has most to say of the step: rollouts.jsonl, or samples.jsonl where that has more samples."""
        with self._lock:
            self._rollouts.update()
            self._shown.update()
            if step is None:
                return self._rollouts if self._rollouts.steps else self._shown
            of_tokens, of_texts = self._rollouts.steps.get(step, {}), self._shown.steps.get(step, {})
            return self._rollouts if of_tokens.get("sampled") or not of_texts else self._shown

    def sampled(self) -> list[list[Summary]]:
        """Of each step in order, the sampled ones with their tokens."""
        with self._lock:
            self._rollouts.update()
            return [list(each["sampled"]) for _, each in sorted(self._rollouts.steps.items()) if "sampled" in each]

    def steps(self) -> list[dict[str, Any]]:
        """The steps that have samples, with how many of each kind."""
        self.samples()
        with self._lock:
            steps = sorted({*self._rollouts.steps, *self._shown.steps})
        found = []
        for step in steps:
            kinds = self.samples(step).steps.get(step, {})
            found.append({"step": step, "kinds": {kind: len(each) for kind, each in kinds.items()}})
        return found

    def notices(self) -> list[dict[str, Any]]:
        return [json.loads(line) for _, line in Tail(self.path / NOTICES_FILE).new()[1]]


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
