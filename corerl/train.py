"""The loop: samples in, optimizer steps, new weights out to the engines. `corerl.driver` assembles what it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from corerl.config.schema import Config
from corerl.driver.launch import launch
from corerl.driver.run import Summary


def train(config: Config) -> Summary:
    """Train as `config` says. Raises CorerlError with the first failure's cause; earlier checkpoints stay."""
    with launch(config) as run:
        with run.training():
            run.push_weights()
        run.evaluate()
        for scored in run.source:  # sampled when asked for, under the weights pushed last
            with run.training():
                stamped = run.with_advantages(scored)
                results = run.optimize(stamped)
                run.progress.step += 1
                run.push_weights()
                run.report(scored, stamped, results)
                run.save()
            run.evaluate()
            if run.stopping:
                break
        return run.finish()


def collect(config: Config) -> Summary:
    """Only sample, with the weights that the run begins with; every batch is kept for a run that only trains."""
    with launch(config) as run:
        with run.training():
            run.push_weights()
        run.evaluate()
        for scored in run.source:  # which writes each batch down
            run.progress.step += 1
            run.report(scored, None, {})
            run.mend_engines()
            if run.stopping:
                break
        return run.finish()


def evaluate(config: Config) -> Summary:
    """Score the weights that the run begins with, or resumes, on the held-out prompts."""
    with launch(config) as run:
        with run.training():
            run.push_weights()
        run.evaluate(always=True)
        return run.finish()


MODES: Mapping[str, Callable[[Config], Summary]] = {
    "train": train,
    "train-only": train,
    "rollout-only": collect,
    "eval": evaluate,
}


def execute(config: Config) -> Summary:
    """What `run.mode` says."""
    return MODES[config.run.mode](config)
