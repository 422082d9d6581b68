"""Who wants other sizes while a run goes on: `corerl scale`, by files in the run's directory, or a scaler."""

from __future__ import annotations

import json
import os
import stat
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from corerl.errors import ConfigError, CorerlError
from corerl.messages import one_line, short_repr

REQUEST, ANSWER = "scale-request.json", "scale-answer.json"  # in the run's directory
LOOK_SECONDS = 0.2  # between two looks for an answer
SETTLED = 5  # steps at the same sizes before `balance` judges them
WORTH = 0.2  # of a step: the difference of idle times above which it moves a device


@frozen
class Request:
    """What `corerl scale` has asked for."""

    id: str
    overrides: tuple[str, ...]


@frozen(kw_only=True)
class Answer:
    """What came of it: a line for each group that was changed, and what went wrong, in lines too."""

    changed: tuple[str, ...]
    error: str = ""


def begin(run_dir: Path) -> None:
    """Forget a request that was made of an earlier run there."""
    (run_dir / REQUEST).unlink(missing_ok=True)


def asked(run_dir: Path) -> Request | None:
    """The request that waits, which is then taken. Raises ConfigError for one that cannot be read, or that another user
    has made, for whom a run does nothing: a backend's name may be a module to import."""
    path = run_dir / REQUEST
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
            raise ConfigError(f"{path} is no file of this user's; remove it")
        text = path.read_text()
        path.unlink()
        content = json.loads(text)
        return Request(str(content["id"]), tuple(map(str, content["overrides"])))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({one_line(error)}); use `corerl scale`") from error


def answer(run_dir: Path, request: Request, answer: Answer) -> None:
    _write(run_dir / ANSWER, {"id": request.id, "changed": list(answer.changed), "error": answer.error})


def ask(run_dir: Path, overrides: Sequence[str], *, runs: Callable[[], bool], notify: Callable[[str], None]) -> Answer:
    """Ask a running run for other sizes and wait for its answer, which comes after a step; `notify` gets a line about
    that. Raises ConfigError if another request waits already, or the run ends (`runs`) without an answer."""
    request = Request(uuid.uuid4().hex, tuple(overrides))
    path = run_dir / REQUEST
    _write(path, {"id": request.id, "overrides": list(overrides)}, replace=False)
    notify("the resize takes effect after the current step")
    try:
        while True:
            alive = runs()
            found = _answered(run_dir, request)
            if found is not None:
                return found
            if not alive:
                raise ConfigError(f"{run_dir}: the run has ended before it could change its sizes")
            time.sleep(LOOK_SECONDS)
    finally:
        if _waits(path, request):  # not taken, and whoever asked no longer waits
            path.unlink(missing_ok=True)


def _waits(path: Path, request: Request) -> bool:
    """Whether this request has not been taken; another one may wait in its place."""
    try:
        found: str = json.loads(path.read_text())["id"]
    except FileNotFoundError:
        return False
    return found == request.id


def _answered(run_dir: Path, request: Request) -> Answer | None:
    try:
        content = json.loads((run_dir / ANSWER).read_text())
    except FileNotFoundError:
        return None
    if content["id"] != request.id:
        return None  # to an earlier one
    return Answer(changed=tuple(content["changed"]), error=content["error"])


def _write(path: Path, content: Mapping[str, Any], *, replace: bool = True) -> None:
    """Write it as a whole. Raises ConfigError, also where there is one that is not to be replaced."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        part.write_text(json.dumps(content))
        (os.replace if replace else os.link)(part, path)  # a link fails if there is one
    except FileExistsError as error:
        raise ConfigError(
            f"{path}: another request waits for the end of a step; wait for it, or remove the file"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"run.dir: cannot write to {path.parent} ({error.strerror}); set another directory"
        ) from error
    finally:
        part.unlink(missing_ok=True)


# ---- a function that decides -----------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Spent:
    """How steps fared, on average, at some sizes."""

    steps: int  # without the first one after a change, which has the seconds of that too; may be 0
    seconds: float  # of a step
    idle: Mapping[str, float]  # metrics such as idle/ranks/total, in seconds of a step


@frozen(kw_only=True)
class Devices:
    """How many devices there are for a run's processes, without those of machines that are gone."""

    reserved: int  # by the run
    unused: int  # of these, by any of its processes
    free: int  # at most so many more has the cluster for it


@frozen(kw_only=True)
class Sizing:
    """What a scaler is asked with, between two steps."""

    step: int  # rollout steps done
    sizes: Mapping[str, int]  # setting, such as roles.actor.ranks or rollout.replicas -> its value
    devices: Devices
    spent: Spent  # since the sizes are these
    earlier: Sequence[tuple[Mapping[str, int], Spent]]  # other sizes that the run had before, the latest last
    refused: Sequence[Mapping[str, int]] = ()  # changes of these sizes that could not be had, on as many devices


Scaler = Callable[[Sizing], Mapping[str, int]]  # returns sizes to change; {} for none


@define(kw_only=True, eq=False)
class Scaling:
    """Asks a scaler after each step, with what the steps at the present sizes took."""

    name: str  # as in the options
    scaler: Scaler
    _at: Mapping[str, int] = field(factory=dict)  # the present sizes
    _totals: dict[str, float] = field(factory=dict)
    _steps: int = 0
    _changing: bool = False  # the sizes have changed since the last step: the next one has the seconds of that
    _earlier: list[tuple[Mapping[str, int], Spent]] = field(factory=list)
    # Changes that could not be had at the present sizes, and how many more devices there were then.
    _refused: dict[frozenset[tuple[str, int]], int] = field(factory=dict)

    def step_done(self, metrics: Mapping[str, float], sizes: Mapping[str, int]) -> None:
        """Note what a step took, at whose end the sizes are these."""
        self._see(sizes)
        changing, self._changing = self._changing, False
        if changing:
            return
        self._steps += 1
        for name, value in metrics.items():
            if name == "time/step" or name.startswith("idle/"):
                self._totals[name] = self._totals.get(name, 0.0) + value

    def wanted(self, step: int, sizes: Mapping[str, int], devices: Devices) -> list[str]:
        """Overrides of the config. Raises CorerlError if the function fails, or returns anything else than sizes."""
        self._see(sizes)
        refused = [dict(change) for change, had in self._refused.items() if devices.unused + devices.free <= had]
        asked = Sizing(
            step=step,
            sizes=sizes,
            devices=devices,
            spent=self._spent,
            earlier=tuple(self._earlier),
            refused=tuple(refused),
        )
        try:
            found = self.scaler(asked)
        except Exception as error:
            raise CorerlError(f"scaler: {self.name} failed: {one_line(error)}") from error
        wanted = {name: value for name, value in self._checked(found, sizes).items() if sizes[name] != value}
        return [] if wanted in refused else [f"{name}={value}" for name, value in wanted.items()]

    def _checked(self, found: object, sizes: Mapping[str, int]) -> dict[str, int]:
        """What the function returned. Raises CorerlError unless it is other values of these sizes."""
        if not isinstance(found, Mapping):
            raise self._returned(found, "a mapping of settings to numbers, {} to change nothing")
        checked: dict[str, int] = {}
        for name, value in found.items():
            if name not in sizes:
                raise self._returned(found, f"no other settings than {', '.join(sizes)}")
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise self._returned(found, f"an integer for {name}")
            checked[name] = int(value)
        return checked

    def _returned(self, found: object, expected: str) -> CorerlError:
        return CorerlError(f"scaler: {self.name} returned {short_repr(found)}, expected {expected}")

    def refused(self, wanted: Sequence[str], devices: Devices) -> None:
        """Note that these could not be had: they are not wanted again until the sizes are others, or there are more
        devices."""
        change = frozenset((name, int(value)) for name, value in (each.split("=") for each in wanted))
        self._refused[change] = devices.unused + devices.free
        self._changing = True

    def _see(self, sizes: Mapping[str, int]) -> None:
        """Start over if the sizes are others now, whether somebody asked for that or a machine is gone."""
        if self._at and self._at != sizes:
            self._earlier.append((self._at, self._spent))
            self._refused.clear()
            self._totals, self._steps, self._changing = {}, 0, True
        self._at = dict(sizes)

    @property
    def _spent(self) -> Spent:
        means = {name: total / self._steps for name, total in self._totals.items()}
        seconds = means.pop("time/step", 0.0)
        return Spent(steps=self._steps, seconds=seconds, idle=means)


def balance(sizing: Sizing) -> Mapping[str, int]:
    """Move a device from the actor's ranks to the engines, or back, whichever side waits longer for the other, or as
    few as make a number of ranks that the run can have; no further once that has made steps longer. For
    `cluster.placement = "disaggregated"` and engines of one device each."""
    ranks, replicas = sizing.sizes["roles.actor.ranks"], sizing.sizes["rollout.replicas"]
    spent = sizing.spent
    if spent.steps < SETTLED:
        return {}
    # Of more devices, or fewer, steps say nothing of how to divide these: some may have been of a machine that is gone.
    earlier = [each for each in sizing.earlier if sum(each[0].values()) == sum(sizing.sizes.values())]
    if earlier and all(sizes != sizing.sizes for sizes, _ in earlier):
        sizes, before = earlier[-1]
        if before.steps >= SETTLED and before.seconds < spent.seconds:
            return sizes  # but once: steps may become longer at any sizes
    difference = spent.idle.get("idle/ranks/total", 0.0) - spent.idle.get("idle/engines/total", 0.0)
    if abs(difference) < WORTH * spent.seconds:
        return {}
    more = -1 if difference > 0 else 1
    for move in range(1, ranks if difference > 0 else replicas):  # no side loses its last device
        wanted = {"roles.actor.ranks": ranks + more * move, "rollout.replicas": replicas - more * move}
        if wanted not in sizing.refused:  # as of ranks over which a step's samples do not divide
            tried = any({name: sizes.get(name) for name in wanted} == wanted for sizes, _ in earlier)
            return {} if tried else wanted
    return {}
