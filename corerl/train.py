"""The training loop: sample, optimize, push new weights to the engines. `corerl.driver` assembles the parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from corerl.config.schema import Config
from corerl.driver.launch import launch
from corerl.driver.run import Summary


def train(config: Config) -> Summary:
    """Train according to `config`. Raises CorerlError with the first failure's cause; earlier checkpoints stay."""
    with launch(config) as run:
        with run.training():
            run.push_weights()
        run.check_logprobs()
        run.evaluate()
        for scored in run.source:  # sampled on demand, with the last pushed weights, or ahead of time
            with run.training():
                batch = run.with_advantages(scored)
                results = run.optimize(batch)
                run.progress.step += 1
                run.push_weights()
                run.report(scored, batch, results)
                run.save()
            run.evaluate()
            if run.stopping:
                break
        return run.finish()


def collect(config: Config) -> Summary:
    """Only sample, with the initial weights, and keep every batch for a run that only trains."""
    with launch(config) as run:
        with run.training():
            run.push_weights()
        run.check_logprobs()
        run.evaluate()
        for scored in run.source:  # writes each batch to disk
            run.progress.step += 1
            run.report(scored, None, {})
            run.mend_engines()
            if run.stopping:
                break
            run.progress.begin("rollout")
        return run.finish()


def evaluate(config: Config) -> Summary:
    """Score the initial or resumed weights on the held-out prompts."""
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
    """Do what `run.mode` selects."""
    return MODES[config.run.mode](config)
