"""The training loop: sample, optimize, push new weights to the engines. `corerl.plan` says what is run, `corerl.driver`
has the parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from corerl.cluster.forks import Forks
from corerl.config.load import as_config
from corerl.config.schema import Config
from corerl.driver.launch import launch
from corerl.driver.run import Run, Summary
from corerl.errors import WorkerDied
from corerl.plan.make import make_plan


def training(run: Run) -> None:
    with run.rewinding_if_ranks_die():
        run.push_weights_and_sleep()
        run.check_logprobs()
        run.evaluate()
    for scored, streamed in run.rollouts():  # waits for samples, and trains on those that arrive early
        # A death is not raised: the end of the block restores the last checkpoint, and `rollouts` goes on from there.
        with run.rewinding_if_ranks_die():
            batch = run.prepare(scored, streamed)
            results = run.optimize(batch)
            run.progress.steps_done += 1
            run.push_weights()
            run.report_step(scored, batch, results)
            run.save()
            run.between_steps()
            run.sleep_ranks()
            run.evaluate()
        if run.stopping:
            break


def sampling(run: Run) -> None:
    """Only sample, with the initial weights, and keep every batch for a run that only trains."""
    deaths: Sequence[WorkerDied] | None = None
    while deaths is None or deaths:  # no later step would repeat the check
        with run.rewinding_if_ranks_die() as deaths:
            run.push_weights_and_sleep()
            run.check_logprobs()
            run.evaluate()
    for scored, _ in run.rollouts():  # written to disk
        run.progress.steps_done += 1
        run.report_step(scored, None, {})
        with run.rewinding_if_ranks_die():
            run.push_weights_and_sleep()  # the weights stay: others start in the place of dead engines
        if run.stopping:
            break
        run.progress.begin("rollout")


def evaluating(run: Run) -> None:
    """Score the initial or resumed weights on the held-out prompts."""
    run.push_weights_and_sleep()
    run.evaluate(always=True)


LOOPS: Mapping[str, Callable[[Run], None]] = {
    "train": training,
    "train-only": training,
    "rollout-only": sampling,
    "eval": evaluating,
}


def train(
    config: Config | Mapping[str, Any] | Path | str, overrides: Sequence[str] = (), *, forks: Forks | None = None
) -> Summary:
    """Do what `run.mode` of a config selects, from its start to its end. A mapping has the tables of a
    TOML file, a path names one; `overrides` are as on the command line, such as "run.steps=10". Its processes start
    by `forks`, if it is given.

    Raises CorerlError with the first failure's cause; earlier checkpoints stay."""
    began = time.monotonic()
    plan = make_plan(as_config(config, overrides)).started_by(forks)
    with launch(plan, began=began) as run:
        LOOPS[run.plan.run.mode](run)
        return run.finish()
