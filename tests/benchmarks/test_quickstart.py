"""CoreRL's side of the benchmark beside TRL; the other side wants an environment of its own."""

from __future__ import annotations

from benchmarks.quickstart import EXAMPLE, overrides
from corerl.config.load import load_config
from corerl.plan.check import contradictions


def test_what_is_changed_of_the_quickstart_for_the_benchmark_makes_a_run() -> None:
    config = load_config(EXAMPLE, overrides(250, 0))
    assert list(contradictions(config)) == []
    assert (config.run.steps, config.eval.every, config.algorithm.overlong) == (250, 250, "keep")
