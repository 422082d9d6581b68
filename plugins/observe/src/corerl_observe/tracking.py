"""What trackers share: their events, the run's config under flat names, and the identity that a resumed run keeps."""

from __future__ import annotations

import json
import os
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from corerl.config import CONFIG_FILE
from corerl.errors import DataError
from corerl.plugin import Evaluated, Event, RunFinished, RunStarted, SampleShown, StepFinished


class Tracker(ABC):
    """An extension that sends all metrics and the shown answers to a tracking library."""

    _options: Any  # with `samples_every`, rollout steps between sampled answers

    def __init__(self, *, options: Any, run_dir: str) -> None:
        self._options = options
        self._run_dir = Path(run_dir)
        self._library: Any = None  # set by `start`, from RunStarted to shutdown
        self._reason = ""  # RunFinished's reason

    @abstractmethod
    def start(self, event: RunStarted) -> None:
        """Open the library and assign it to `_library`; leave that None not to track this run."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float], kind: str, shown: Sequence[SampleShown]) -> None:
        """Send the metrics and answers of a step. `kind` says what `shown` are: rollout or held-out."""

    @abstractmethod
    def close(self, library: Any, reason: str) -> None:
        """Close what `start` opened; `reason` is RunFinished's, or else the shutdown's."""

    def observe(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.start(event)
        if self._library is None:
            return
        match event:
            case StepFinished():
                every = self._options.samples_every
                shown = event.shown if every and event.step % every == 0 else ()
                self.log(event.step, event.metrics, "rollout", shown)
            case Evaluated():
                self.log(event.step, event.metrics, "held-out", event.shown)
            case RunFinished():
                self._reason = event.reason

    def shutdown(self, reason: str) -> None:
        library, self._library = self._library, None
        if library is not None:
            self.close(library, self._reason or reason)


def read_config(run_dir: Path) -> dict[str, Any]:
    """The run's whole config, defaults included; empty before the run has one."""
    path = run_dir / CONFIG_FILE
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """`{"train": {"betas": [0.9]}}` as `{"train.betas.0": 0.9}`; empty tables and arrays are left out."""
    return dict(_leaves("", config))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    else:
        yield path, value
        return
    for key, child in children:
        yield from _leaves(f"{path}.{key}" if path else str(key), child)


class Identity:
    """A tracker's identifiers of the run, stored in the run's directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, *, goes_on: bool) -> dict[str, str]:
        """The stored identifiers of a run that continues; empty for a new run, or if it was not tracked before."""
        if not goes_on or not self._path.exists():
            return {}
        try:
            identity = json.loads(self._path.read_bytes())
        except ValueError as error:
            raise DataError(f"{self._path} is not valid JSON: {error}; remove it to begin a new run there") from error
        if not isinstance(identity, dict) or not all(isinstance(value, str) for value in identity.values()):
            raise DataError(f"{self._path} is no object of texts; remove it to begin a new run there")
        return identity

    def write(self, **identity: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_name(f".{self._path.name}.part")
        part.write_text(json.dumps(identity) + "\n", encoding="utf-8")
        os.replace(part, self._path)
