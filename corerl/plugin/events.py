"""The events that extensions receive through `observe`, as frozen data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import asdict, field, frozen

if TYPE_CHECKING:
    from corerl.types import SampleBatch


@frozen(kw_only=True)
class SampleShown:
    """One sampled answer as text, for display."""

    prompt: str  # of a chat: its only message, or all messages as lines `role: content`
    response: str
    answer: str
    reward: float
    sample: int = 0  # its number among the prompt's samples
    source: str = ""  # of the prompt, if several are mixed; of a set of held-out prompts, its name
    # The names of the prompt's pictures: of shown held-out prompts, RUN_DIR/pictures/NAME.png is there.
    pictures: tuple[str, ...] = field(default=(), converter=tuple[str, ...])
    parts: Mapping[str, float] = field(factory=dict)  # of the reward, by name

    def record(self) -> dict[str, Any]:
        """For JSON; without `pictures` and `parts` if there are none."""
        return asdict(self, filter=lambda _, value: value not in ((), {}))


@frozen(kw_only=True)
class RunStarted:
    """The run is about to take its first step."""

    run_dir: str
    steps: int  # rollout steps in all
    first_step: int  # 0, or the step at which the run resumes
    title: str  # one line: model, backend, engine
    mode: str = "train"  # run.mode
    same_run: bool = True  # the resumed checkpoint is from run_dir; else what run_dir holds is from another run

    @property
    def goes_on(self) -> bool:
        """Whether trackers know the run already: it resumes in its own directory, or scores a checkpoint."""
        return self.first_step > 0 and (self.same_run or self.mode == "eval")

    @property
    def repeats_from(self) -> float:
        """The first step that is done again: earlier records from here on are replaced. Infinite for a run that only
        scores, which replaces nothing."""
        if self.mode == "eval":
            return math.inf
        return self.first_step if self.same_run else 0


@frozen(kw_only=True)
class PhaseStarted:
    """The driver begins something that takes a while; the display shows it until the next phase."""

    name: str
    step: int


@frozen(kw_only=True)
class PhaseProgress:
    """The phase goes on; emitted about once a second, from a thread of its own."""

    name: str  # as in PhaseStarted
    step: int
    seconds: float  # since it started
    unit: str = ""  # what is counted, such as 'samples generated'; "" if nothing is
    done: int = 0
    of: int = 0


@frozen(kw_only=True)
class Idle:
    """A time in which the ranks, or an engine, did nothing."""

    who: str  # "ranks", or the engine's name
    waits_for: str  # samples, rewards or driver; of an engine also longest, the samples of another one, or training
    started: float  # by time.time() of the driver
    ended: float


@frozen(kw_only=True)
class StepFinished:
    """One rollout step is done. `metrics` are final numbers under names such as `train/loss`, `time/rollout`."""

    step: int
    metrics: Mapping[str, float]
    shown: Sequence[SampleShown] = field(factory=tuple)  # a few of the samples
    samples: Sequence[SampleShown] = field(factory=tuple)  # all; samples of one prompt are adjacent
    idle: Sequence[Idle] = field(factory=tuple)  # since the last step's end
    # The rows of `samples`, those of one sample adjacent; sample number n is row `batch.episodes[0][n]`. If the step
    # trained, with the columns that the losses read, and `row_columns["shaped_rewards"]`, rewards after penalties.
    # Shared with the run: do not change it, nor keep it for long.
    batch: SampleBatch | None = field(default=None, eq=False, repr=False)


@frozen(kw_only=True)
class Evaluated:
    """The held-out prompts have been answered and scored."""

    step: int
    metrics: Mapping[str, float]  # eval/reward, eval/exact_match, eval/pass@8, eval/NAME/reward, ...
    shown: Sequence[SampleShown] = field(factory=tuple)  # of the first held-out prompts
    samples: Sequence[SampleShown] = field(factory=tuple)  # of all held-out prompts; samples of one prompt are adjacent


@frozen(kw_only=True)
class CheckpointSaved:
    """A checkpoint is complete on disk."""

    step: int
    path: str


@frozen(kw_only=True)
class Notice:
    """A sentence that the user should read. The run keeps it in notices.jsonl; if no extension's spec says
    `shows_notices`, it is printed to stderr."""

    text: str
    step: int = 0  # rollout steps done


@frozen(kw_only=True)
class RunFinished:
    """The run is over, however it ended."""

    reason: str  # finished, interrupted, failed
    steps_done: int
    seconds: float  # since the run was launched: its checks and the start of its processes included
    before: Sequence[SampleShown] = field(factory=tuple)  # the same prompts before and after training
    after: Sequence[SampleShown] = field(factory=tuple)
    artifacts: Mapping[str, str] = field(factory=dict)  # what -> path


@frozen(kw_only=True)
class Span:
    """When something started and ended, by time.time() on the machine where it happened, or another clock."""

    name: str
    started: float
    ended: float


@frozen(kw_only=True)
class RunRewound:
    """The run goes on from an earlier step, as a resumed one does: what was recorded of the steps from there on is
    replaced. A notice has said why."""

    step: int  # rollout steps that stay done


@frozen(kw_only=True)
class CallFinished:
    """A process has answered a call. Emitted only if an extension's spec says `traces=True`."""

    process: str  # actor rank 0, engine-0, ...
    verb: str  # train, generate, ...
    call: str  # the verb with the driver's details: 'train at optimizer step 3'
    asked: float  # time.time() on the driver
    started: float  # time.time() in the process, like `ended`; until then it was busy with earlier calls
    ended: float
    lane: int = 0  # above 0 if the process works on several calls at once
    error: str = ""
    spans: Sequence[Span] = field(factory=tuple)  # the parts of the call, outer spans before inner ones
    waits: Sequence[Span] = field(factory=tuple)  # times at which it was seen waiting in a collective


Event: TypeAlias = (
    RunStarted
    | PhaseStarted
    | PhaseProgress
    | StepFinished
    | Evaluated
    | CheckpointSaved
    | Notice
    | RunRewound
    | CallFinished
    | RunFinished
)
