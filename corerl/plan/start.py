"""Find where a run begins: its directory, and the checkpoint that it resumes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from corerl.checkpoint.commit import NO_FAULTS, Faults
from corerl.config.problems import Problems
from corerl.config.schema import Config
from corerl.data.prompts import PromptSource, PromptStream
from corerl.data.resumed import resume_data
from corerl.errors import CheckpointError
from corerl.plan.run_dir import (
    lies_in,
    lost_checkpoints,
    require_steps_left,
    resume_from,
    resumed_run,
    would_overwrite,
)
from corerl.plan.state import read_run
from corerl.plan.writable import require_writable


@frozen(kw_only=True)
class Start:
    """Where a run begins."""

    run_dir: Path
    resume: Path | None  # a checkpoint that fits this run, if it resumes
    state: Mapping[str, Any]  # the driver's part of the checkpoint; empty for a fresh run
    lost: tuple[str, ...]  # notices about checkpoints that are newer than `resume`, but damaged
    resumed: Path | None  # the run that `resume` is the newest intact checkpoint of; None if it was named itself
    data: tuple[str, ...] = ()  # notices about rows that have changed since the checkpoint

    @property
    def same_run(self) -> bool:
        """Whether it resumes from its own directory, which then also holds the earlier metrics."""
        return self.resume is None or lies_in(self.resume, self.run_dir)


def find_start(
    config: Config,
    prompts: PromptSource | None,
    problems: Problems,
    *,
    starting: bool,
    damaged: Faults = NO_FAULTS,
) -> Start:
    """Where a run of the config begins. What is wrong with that goes to `problems`; then it has nothing to resume."""
    run_dir = Path(config.run.dir).absolute()
    resume: Path | None = None
    state: dict[str, Any] = {}
    with problems.stage("run.dir"):
        require_writable(run_dir)
    if problems.none_in("checkpoint.resume", "run.dir"):
        with problems.stage("checkpoint.resume", path="checkpoint.resume"):
            found = resume_from(config, run_dir, starting=starting, damaged=damaged)
            state = read_run(found) if found else {}
            resume = found
    if state and config.run.mode != "eval":
        with problems.stage("checkpoint.source", path="checkpoint.resume"):
            require_same_source(state, config, str(resume))
    data: list[str] = []
    if "data" in state and config.run.samples and prompts is not None and problems.none_in("data", "checkpoint"):
        with problems.stage("checkpoint.data", path="checkpoint.resume"):
            data = check_data(config, prompts, state)
    if starting and problems.none_in("checkpoint.resume"):
        for line in would_overwrite(config, run_dir, resume):
            problems.add(line)
        if resume and state and config.run.trains:
            with problems.stage("run.steps"):
                require_steps_left(config, run_dir, resume, done=int(state["rollout_step"]))
    return Start(
        run_dir=run_dir,
        resume=resume,
        state=state,
        lost=tuple(lost_checkpoints(config, run_dir, damaged)),
        resumed=resumed_run(config, run_dir),
        data=tuple(data),
    )


def check_data(config: Config, prompts: PromptSource, state: Mapping[str, Any]) -> list[str]:
    """Hold out what the checkpoint did; returns notices about other rows than the checkpoint's. Raises CheckpointError
    if a run would train on other ones, unless `data.restart` is set."""
    lines, differs = resume_data(prompts, state, seed=config.run.seed)
    trains = config.run.mode == "train"
    if differs and trains and not config.data.restart:
        raise CheckpointError(
            f"the data are not the checkpoint's: {differs}; use the same [data] and run.seed, or set data.restart=true "
            "to begin these at their first prompt, with the checkpoint's weights, optimizer and step"
        )
    if trains:
        PromptStream(prompts, config.run.seed).restore(state["source"]["prompts"])  # raises if it does not fit
    begin = "; they begin at their first prompt" if trains else ""
    return [*lines, *([f"data: not the checkpoint's: {differs}{begin}"] if differs else [])]


def require_same_source(state: Mapping[str, Any], config: Config, checkpoint: str) -> None:
    """Raise CheckpointError if a run that samples would resume one that read saved batches, or the other way round."""
    sampled = "prompts" in state["source"]
    if sampled != config.run.samples:
        raise CheckpointError(
            f"{checkpoint} is of a run that {'sampled its batches' if sampled else 'read saved batches'}, but "
            f"run.mode={config.run.mode!r} does not; resume with the run.mode it was trained with"
        )
