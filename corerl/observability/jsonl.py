"""Write a run's metrics, samples and notices to files of its directory, one JSON object per line, and read them."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from attrs import asdict, frozen

from corerl.config.options import option
from corerl.errors import DataError
from corerl.plugin.events import Evaluated, Event, Notice, RunRewound, RunStarted, SampleShown, StepFinished
from corerl.plugin.spec import ExtensionSpec, Process

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
NOTICES_FILE = "notices.jsonl"
BEGINS = re.compile(rb'\{"step": (\d+)[,}]')


@frozen(kw_only=True)
class JsonlOptions:
    samples: Literal["none", "shown", "all"] = option(
        "sampled answers that samples.jsonl gets; shown: three of each step and of each evaluation, which the console "
        "shows too; all: every one",
        default="shown",
    )


JSONL = ExtensionSpec(
    implementation="corerl.observability.jsonl:Jsonl",
    config=JsonlOptions,
    api=(2, 0),
    summary="metrics.jsonl and samples.jsonl in the run directory",
    process=Process.DRIVER,
    joins="default",
    place=20,
)


def keep(path: Path) -> None:
    """Rename an existing file to the next free number: trace-1.json."""
    if path.exists():
        number = 1
        while (other := path.with_stem(f"{path.stem}-{number}")).exists():
            number += 1
        path.rename(other)


def reopen(path: Path, *, before: float, same_run: bool = False) -> IO[str]:
    """Open `path` for appending after atomically dropping all steps from `before` on. If `before` is 0, and it is not
    of the same run anyway, first keep the existing file under another name."""
    if not before and not same_run and path.exists() and path.stat().st_size:
        keep(path)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        # One by one: a long run's samples, with their tokens, are more than memory holds.
        file.writelines(raw for number, raw in _whole_lines(path) if _step(raw, path, number) < before)
    os.replace(part, path)
    return path.open("a", encoding="utf-8", newline="\n")


def read_lines(path: Path, *, before: float) -> Iterator[dict[str, Any]]:
    """The objects of `path` whose step is smaller than `before`; none if there is no file.

    A killed run can leave its last line incomplete, without a newline; that line is left out.
    Raises DataError, naming the line, for any other line that is not an object with a step.
    """
    for number, raw in _whole_lines(path):
        step, record = _parsed(raw, path, number)
        if step < before:
            yield record


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are complete, numbered from 1; none if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                return
            yield number, raw


def _parsed(raw: bytes, path: Path, number: int) -> tuple[int, dict[str, Any]]:
    try:
        record = json.loads(raw.decode())
        return int(record["step"]), record
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        shown = raw.decode(errors="replace").strip()[:60]
        raise DataError(f"{path}:{number}: {shown!r} is not an object with a step; fix or delete the line") from error


def _step(raw: bytes, path: Path, number: int) -> int:
    """Of a line that begins with its step, without reading on: a sample with its tokens is long."""
    begins = BEGINS.match(raw)
    return int(begins[1]) if begins else _parsed(raw, path, number)[0]


class Jsonl:
    """Writes the files. A resumed run first drops the steps that it repeats, so its files look as if it had never
    stopped. A new run keeps the previous run's files, as metrics-1.jsonl; a run that only scores appends."""

    def __init__(self, *, options: JsonlOptions, run_dir: str) -> None:
        self._options = options
        self._run_dir = Path(run_dir)
        self._metrics: IO[str] | None = None
        self._samples: IO[str] | None = None

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._open(event.repeats_from)
            case RunRewound():
                self._open(event.step, same_run=True)
            case StepFinished():
                self._write(event.step, event.metrics, self._chosen(event), kind="sampled")
            case Evaluated():
                self._write(event.step, event.metrics, self._chosen(event), kind="held-out")

    def shutdown(self, reason: str) -> None:
        self.close()

    def _open(self, before: float, *, same_run: bool = False) -> None:
        self.close()
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = reopen(self._run_dir / METRICS_FILE, before=before, same_run=same_run)
        if self._options.samples != "none":
            self._samples = reopen(self._run_dir / SAMPLES_FILE, before=before, same_run=same_run)

    def close(self) -> None:
        for file in (self._metrics, self._samples):
            if file is not None:
                file.close()
        self._metrics = self._samples = None

    def _chosen(self, event: StepFinished | Evaluated) -> Sequence[SampleShown]:
        return event.samples if self._options.samples == "all" else event.shown

    def _write(self, step: int, metrics: Mapping[str, float], answers: Sequence[SampleShown], *, kind: str) -> None:
        if self._metrics is not None:
            numbers = {name: float(value) for name, value in metrics.items()}
            # JSON has neither NaN nor infinity; other readers understand null.
            plain = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
            self._metrics.write(json.dumps({"step": step, **plain}, allow_nan=False) + "\n")
            self._metrics.flush()
        if self._samples is not None:
            for answer in answers:
                self._samples.write(json.dumps({"step": step, "kind": kind, **answer.record()}) + "\n")
            self._samples.flush()


class NoticeFile:
    """An observer of every run. A resumed run appends, without a text that the file has; a new run keeps the previous
    run's file, as notices-1.jsonl."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = Path(run_dir)
        self._file: IO[str] | None = None
        self._written: set[str] = set()

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.close()
                self._file = reopen(self._run_dir / NOTICES_FILE, before=math.inf if event.repeats_from else 0)
                self._written = {notice.text for notice in read_notices(self._run_dir)}
            case Notice() if self._file is not None and event.text not in self._written:
                self._written.add(event.text)
                self._file.write(json.dumps(asdict(event)) + "\n")
                self._file.flush()

    def shutdown(self, reason: str) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def read_notices(run_dir: Path) -> Iterator[Notice]:
    """The notices of a run so far, the first one first; none if its directory has no such file."""
    for record in read_lines(run_dir / NOTICES_FILE, before=math.inf):
        yield Notice(step=record["step"], text=str(record.get("text")))
