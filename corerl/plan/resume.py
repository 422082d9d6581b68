"""Find where a run begins: its directory, in which nothing is overwritten, and the checkpoint that it resumes from,
with the state that the driver left there; compare the run's rows with the checkpoint's, and hold out the same ones."""

from __future__ import annotations

import errno
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from corerl.checkpoint.commit import Faults, latest, newest_intact, read_state
from corerl.checkpoint.format import DRIVER_FILE, checkpoints_dir
from corerl.config.schema import Config
from corerl.data.files import formats_here
from corerl.data.prompts import PromptSource, PromptStream
from corerl.errors import CheckpointError, ConfigError, DataError, NothingLeft
from corerl.messages import install_hint
from corerl.observability.jsonl import METRICS_FILE, SAMPLES_FILE, read_lines
from corerl.plan.check import Problems
from corerl.plugin.registry import Kind, load_implementation
from corerl.rollout.recorded import ROLLOUTS

EXPORT = "model"  # subdirectory for the final Hugging Face export
ADVICE = re.compile(r"(?:;|, so) resume from ")  # with which a checkpoint's fault ends


@frozen(kw_only=True)
class Start:
    """Where a run begins."""

    run_dir: Path
    resume: Path | None  # a checkpoint that fits this run, if it resumes
    state: Mapping[str, Any]  # the driver's part of the checkpoint; empty for a fresh run
    lost: tuple[str, ...]  # notices about checkpoints that are newer than `resume`, but damaged
    data: tuple[str, ...] = ()  # notices about rows that have changed since the checkpoint

    @property
    def same_run(self) -> bool:
        """Whether it resumes from its own directory, which then also holds the earlier metrics."""
        return self.resume is None or lies_in(self.resume, self.run_dir)


def find_start(config: Config, prompts: PromptSource, *, starting: bool) -> Start:
    """Where a run of the config begins. Raises all problems together."""
    run_dir = Path(config.run.dir).absolute()
    require_writable(run_dir)
    state: dict[str, Any] = {}
    data: list[str] = []
    problems = Problems()
    with problems.stage("checkpoint.resume"):
        resume, faults = checkpoint_to_resume(config, run_dir, starting=starting)
        state = read_state(resume) if resume else {}
        if state and config.run.trains:  # others take its weights alone
            require_same_source(state, config, str(resume))
        if "data" in state and config.run.has_engines:
            data = check_data(config, prompts, state)
    problems.raise_all()
    if starting:
        problems.add(*would_overwrite(config, run_dir, resume))
        if resume and config.run.trains:
            with problems.stage():
                require_steps_left(config, run_dir, resume, done=int(state["rollout_step"]))
    problems.raise_all()
    return Start(
        run_dir=run_dir,
        resume=resume,
        state=state,
        lost=tuple(
            f"checkpoint.resume: skipping {checkpoint.name}, the run falls back to an older checkpoint: "
            f"{ADVICE.split(fault)[0]}"  # without the advice to do that
            for checkpoint, fault in faults.items()
        ),
        data=tuple(data),
    )


def check_data(config: Config, prompts: PromptSource, state: Mapping[str, Any]) -> list[str]:
    """Hold out what the checkpoint did; returns notices about other rows than the checkpoint's. Raises CheckpointError
    if a run would train on other ones, unless `data.restart` is set."""
    lines, differs = list[str](), ""
    if (prompts.record["identity"], config.run.seed) != (state["data"]["identity"], state["source"]["prompts"]["seed"]):
        if (divide := _divider()) is not None:
            lines, differs = divide(prompts, state, seed=config.run.seed)
        else:
            prompts.replaces = state["data"]["identity"]
            differs = f"other rows, another order or another seed ({install_hint('data')} to compare them)"
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


def _divider() -> Callable[..., tuple[list[str], str]] | None:
    """What a wheel divides rows with that are not the checkpoint's, or in another order; None if there is none."""
    for each in formats_here():
        if each.spec.resumes:
            found: Callable[..., tuple[list[str], str]] = load_implementation(Kind.FORMATS, each, each.spec.resumes)
            return found
    return None


def require_same_source(state: Mapping[str, Any], config: Config, checkpoint: str) -> None:
    """Raise CheckpointError if a run that trains on new samples would resume one that read saved batches, or the other
    way round."""
    sampled = "prompts" in state["source"]
    if sampled != config.run.has_engines:
        raise CheckpointError(
            f"{checkpoint} is of a run that {'sampled its batches' if sampled else 'read saved batches'}, but "
            f"run.mode={config.run.mode!r} does not; resume with the run.mode it was trained with"
        )


# ---- what to resume from ---------------------------------------------------------------------------------------------


def checkpoint_to_resume(config: Config, run_dir: Path, *, starting: bool) -> tuple[Path | None, Faults]:
    """The checkpoint to resume from, if any, and the newer ones that are skipped for it, each with its fault. Raises
    ConfigError rather than overwrite another run."""
    resume = config.checkpoint.resume
    newest, faults = newest_intact(run_dir)
    if starting and newest is not None and not config.run.trains:
        advice = f", or use: corerl eval {shlex.quote(str(run_dir))}" if config.run.mode == "eval" else ""
        raise ConfigError(
            f"run.dir: {run_dir} already holds a run ({newest.name}), whose results run.mode={config.run.mode!r} "
            f"would overwrite; set another run.dir{advice}"
        )
    if (starting or resume == "auto") and newest is None and faults:
        fault = next(iter(faults.values()))
        raise ConfigError(
            f"run.dir: {run_dir} already holds a run, but none of its checkpoints can be resumed: "
            f"{ADVICE.split(fault)[0]}; set "
            f"another run.dir, or, to start over here, remove {checkpoints_dir(run_dir)}"
        )
    if resume == "auto":
        return newest, faults
    chosen, skipped = None if resume == "never" else Path(resume).absolute(), dict[Path, str]()
    if chosen is not None and os.path.isdir(checkpoints_dir(run := chosen)):  # os.path: it may be no file's name
        chosen, skipped = newest_intact(run)
        if chosen is None:
            found = [ADVICE.split(fault)[0] for fault in skipped.values()]
            raise ConfigError(
                f"checkpoint.resume: {run} is a run without {'an intact' if found else 'a complete'} checkpoint"
                f"{': ' + found[0] if found else ''}; set the path of another run or checkpoint"
            )
    # Retention would treat the existing checkpoints as this run's, and the next resume would take whichever is newest.
    if starting and newest is not None and (chosen is None or chosen.resolve() != newest.resolve()):
        raise ConfigError(
            f"run.dir: {run_dir} already holds a run ({newest.name}); continue it with checkpoint.resume=auto, or set "
            "another run.dir"
        )
    return chosen, skipped


# ---- what must not be lost -------------------------------------------------------------------------------------------


def require_writable(run_dir: Path) -> None:
    """Raise ConfigError if the directory, or what there is of its path, cannot be written to; makes nothing."""
    there = next(each for each in (run_dir, *run_dir.parents) if os.path.lexists(each))
    number = errno.ENOTDIR if not there.is_dir() else errno.EACCES if not os.access(there, os.W_OK | os.X_OK) else 0
    if number:
        raise unwritable(run_dir, OSError(number, f"{there}: {os.strerror(number)}"))


def unwritable(run_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(f"run.dir: cannot write to {run_dir} ({error.strerror}); set another directory")


def lies_in(checkpoint: Path, run_dir: Path) -> bool:
    """Whether the checkpoint belongs to that run itself; a subdirectory may hold another run."""
    return checkpoint.resolve().parent in (run_dir.resolve(), checkpoints_dir(run_dir).resolve())


def would_overwrite(config: Config, run_dir: Path, resume: Path | None) -> Iterator[str]:
    """A line for each thing in the directory that a starting run would overwrite or mix with its own output."""
    goes_on = resume is not None and lies_in(resume, run_dir)
    if goes_on:
        for name in (METRICS_FILE, SAMPLES_FILE):
            try:
                for _ in read_lines(run_dir / name, before=math.inf):
                    pass
            except DataError as error:
                yield f"run.dir: {error.message}"
    keeps = config.run.mode == "rollout-only" or (config.rollout.save and config.run.has_engines)
    if keeps and not (goes_on and config.run.trains) and os.path.isdir(run_dir / ROLLOUTS):
        yield f"run.dir: {run_dir} already holds rollouts, which would be mixed with new ones; set another run.dir"
    exports = config.run.trains and config.checkpoint.export
    if exports and os.path.lexists(run_dir / EXPORT) and latest(run_dir) is None:
        yield (
            f"run.dir: {run_dir / EXPORT} already exists, and the run would replace it with its export; set another "
            "run.dir, or checkpoint.export=false"
        )


def require_steps_left(config: Config, run_dir: Path, resume: Path, *, done: int) -> None:
    """Raise if a training run would start with all its steps `done`: NothingLeft if they are its own, say because a
    scheduler restarted it, otherwise ConfigError. A run killed before exporting its last checkpoint may still start."""
    steps, exports = config.run.steps, config.checkpoint.export
    if done > steps or (done == steps and not lies_in(resume, run_dir)):
        raise ConfigError(
            f"run.steps: {steps}, but the checkpoint {resume} has already done {done}; raise run.steps to continue"
        )
    if done < steps:
        return
    exported, saved = run_dir / EXPORT / "config.json", resume / DRIVER_FILE
    # An export no older than the checkpoint is not of fewer steps.
    if not exports or (exported.is_file() and exported.stat().st_mtime_ns >= saved.stat().st_mtime_ns):
        found = f" and {run_dir / EXPORT} is its export" if exports else ""
        raise NothingLeft(
            f"run.steps: {steps}, which {run_dir} has already done{found}: nothing is left to do; raise run.steps to "
            "continue"
        )
