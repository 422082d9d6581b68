"""What extensions hear through `observe`, as frozen data."""

from __future__ import annotations

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


Event: TypeAlias = RunStarted | PhaseStarted | StepFinished | Evaluated | CheckpointSaved | Notice | RunFinished
