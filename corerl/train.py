"""The loop: samples in, optimizer steps, new weights out to the engines. `corerl.driver` assembles what it calls."""

from __future__ import annotations

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
                results = run.optimize(stamped.samples)
                run.rollout_step += 1
                run.push_weights()
                run.report(scored, stamped, results)
                run.save()
            run.evaluate()
            if run.stop.requested:
                break
        return run.finish()
