"""examples/plugins/transport: planned as core's own transports are; it takes a run's weights to its engines."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve

from corerl.config.schema import WeightsConfig
from corerl.errors import ConfigError
from corerl.plan.make import make_plan
from corerl_testing import tolerances
from tests.driver.saved import config_in
from tests.end_to_end.command import Command, metrics, write_small
from tests.examples.packages import put


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    site = put("transport", tmp_path / "site")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    yield site
    for module in [name for name in sys.modules if name.partition(".")[0] == "corerl_zipped"]:
        del sys.modules[module]


def test_its_options_and_its_version_reach_ranks_and_engines(installed: Path, tmp_path: Path) -> None:
    config = evolve(config_in(tmp_path / "run"), weights=WeightsConfig(transport="zipped"))
    planned = make_plan(evolve(config, transports={"zipped": {"level": 6}})).processes
    assert (planned.transport, planned.transport_options) == ("zipped", {"level": 6})
    assert planned.engine is not None
    for assignment in (planned.roles["actor"].assignments[0], planned.engine.assignments[0]):
        assert assignment.transport == "zipped"
        assert str(assignment.origins[-1]) == "transport 'zipped' (corerl-zipped 0.1.0)"
    with pytest.raises(ConfigError, match=r"^transports\.zipped\.level: .*-1"):
        make_plan(evolve(config, transports={"zipped": {"level": -1}}))


@pytest.mark.processes
def test_in_a_run_engines_sample_with_the_weights_that_it_sends(installed: Path, tmp_path: Path) -> None:
    settings = ["backend.name=plain", "roles.actor.ranks=1", "run.steps=3", "eval.every=0", "weights.verify_every=1"]
    own = ["weights.transport=zipped", f"run.dir={tmp_path}/run"]
    with Command("train", write_small(tmp_path), *settings, *own, logs=tmp_path, packages=installed) as command:
        assert command.finish() == 0, command.err
    worst = [line["rollout/logprob_diff_max"] for line in metrics(tmp_path / "run")]
    assert len(worst) == 3 and max(worst) <= tolerances.ENGINE_LOGPROBS
