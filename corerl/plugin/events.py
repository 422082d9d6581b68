"""What extensions hear through `observe`, as frozen data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from attrs import field, frozen


@frozen(kw_only=True)
class Shown:
    """One sampled answer, as text, to look at."""

    prompt: str
    response: str
    answer: str
    reward: float


@frozen(kw_only=True)
class RunStarted:
    run_dir: str
    steps: int  # rollout steps in all
    first_step: int  # 0, or where the run was resumed
    title: str  # one line: model, backend, engine
    mode: str = "train"  # as run.mode
    same_run: bool = True  # what is resumed is of run_dir; what that one holds is otherwise of another run

    @property
    def goes_on(self) -> bool:
        """Trackers know the run already: it is resumed in its directory, or one of its checkpoints is scored."""
        return self.first_step > 0 and (self.same_run or self.mode == "eval")

    @property
    def repeats_from(self) -> float:
        """Steps from here on are done again: what is known of them from before is replaced. Nothing is where a run only
        scores, whichever weights were scored before."""
        if self.mode == "eval":
            return math.inf
        return self.first_step if self.same_run else 0


@frozen(kw_only=True)
class PhaseStarted:
    """The driver begins something that takes a while; the display says so until the next one."""

    name: str
    step: int


@frozen(kw_only=True)
class StepFinished:
    """One rollout step is done. `metrics` are finished numbers under names such as `train/loss`, `time/rollout`."""

    step: int
    metrics: Mapping[str, float]
    shown: Sequence[Shown] = field(factory=tuple)


@frozen(kw_only=True)
class Evaluated:
    step: int
    metrics: Mapping[str, float]  # eval/reward, eval/exact_match
    shown: Sequence[Shown] = field(factory=tuple)


@frozen(kw_only=True)
class CheckpointSaved:
    step: int
    path: str


@frozen(kw_only=True)
class Notice:
    """A sentence that the user should read."""

    text: str


@frozen(kw_only=True)
class RunFinished:
    reason: str  # finished, interrupted, failed
    steps_done: int
    seconds: float
    before: Sequence[Shown] = field(factory=tuple)  # the same prompts before and after training
    after: Sequence[Shown] = field(factory=tuple)
    artifacts: Mapping[str, str] = field(factory=dict)  # what -> path


@frozen(kw_only=True)
class Span:
    """From when to when something went on, by time.time() of the machine that it went on on."""

    name: str
    started: float
    ended: float


@frozen(kw_only=True)
class Worked:
    """A process has answered a call. Told only where an extension's spec says `traces=True`."""

    process: str  # actor rank 0, engine-0, ...
    verb: str  # train, generate, ...
    call: str  # the verb, and what else the driver says of this one: 'train at optimizer step 3'
    asked: float  # time.time() on the driver
    started: float  # time.time() where it worked, as is `ended`; before `started` it did what was asked earlier
    ended: float
    lane: int = 0  # more than 0 where it works on several calls at the same time
    error: str = ""
    spans: Sequence[Span] = field(factory=tuple)  # what it did in it, outer ones before those inside them
    waits: Sequence[Span] = field(factory=tuple)  # when it was seen to wait in a collective


Event: TypeAlias = (
    RunStarted | PhaseStarted | StepFinished | Evaluated | CheckpointSaved | Notice | Worked | RunFinished
)
