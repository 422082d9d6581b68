"""A small scripted run, as the events that a driver would send."""

from __future__ import annotations

from collections.abc import Iterator

from corerl.plugin.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Notice,
    PhaseStarted,
    RunFinished,
    RunStarted,
    SampleShown,
    StepFinished,
)

STEPS = 4


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(response: str, reward: float) -> tuple[SampleShown, ...]:
    return (SampleShown(prompt="35018>", response=response, answer="01358", reward=reward),)


def metrics(step: int) -> dict[str, float]:
    """A function of the step alone, so that a resumed run says again what the first one said."""
    return {
        "rollout/reward": 0.1 + 0.2 * step,
        "rollout/response_length": 6.0,
        "rollout/truncated": 0.25,
        "rollout/logprob_diff": 1e-6 * (step + 1),
        "train/loss": -0.01 * (step + 1),
        "train/entropy": 2.0 - 0.25 * step,
        "train/grad_norm": 0.5,
        "time/rollout": 1.0,
        "time/train": 2.0,
        "time/step": 3.0,
        "perf/tokens_per_second": 12345.6,
    }


def evaluated(step: int) -> Evaluated:
    scores = {"eval/reward": 0.25 * step, "eval/exact_match": 0.125 * step}
    return Evaluated(step=step, metrics=scores, shown=shown("held out", 0.5))


def steps(first: int, last: int) -> Iterator[Event]:
    """Rollout steps `first` to `last - 1`, evaluated before every second one."""
    for step in range(first, last):
        if step % 2 == 0:
            yield evaluated(step)
        yield PhaseStarted(name="rollout", step=step)
        yield StepFinished(step=step, metrics=metrics(step), shown=shown("01358", 1.0))


def started(run_dir: str, *, first_step: int = 0, mode: str = "train") -> RunStarted:
    title = "qwen3 on plain, fake engine"
    return RunStarted(run_dir=run_dir, steps=STEPS, first_step=first_step, title=title, mode=mode)


def finished(run_dir: str) -> RunFinished:
    return RunFinished(
        reason="finished",
        steps_done=STEPS,
        seconds=75.0,
        before=shown("\x1b[31m9\n", 0.0),
        after=shown("01358", 1.0),
        artifacts={"metrics": f"{run_dir}/metrics.jsonl", "export": f"{run_dir}/export"},
    )


def whole(run_dir: str) -> Iterator[Event]:
    yield PhaseStarted(name="starting ray", step=0)
    yield PhaseStarted(name="starting ranks", step=0)
    yield started(run_dir)
    yield Notice(text="no reference policy")
    yield from steps(0, STEPS)
    yield evaluated(STEPS)
    yield CheckpointSaved(step=STEPS, path=f"{run_dir}/checkpoints/4")
    yield finished(run_dir)
