"""What ranks and engines import before a run's plan is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl.config.load import load_config
from corerl.plan.environment import Preload, preload_of
from corerl.plan.make import make_plan

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"


def test_all_processes_of_the_quickstart_are_forked() -> None:
    config = load_config(QUICKSTART)
    found = preload_of(config)
    assert {"corerl_fsdp.backend", "corerl_transformers.engine", "corerl.trainer.worker"} <= set(found.modules)
    processes = make_plan(config, starting=False).processes
    assert processes.engine is not None
    for its in (*(role.environment for role in processes.roles.values()), processes.engine.environment):
        assert its.items() <= found.environment.items()


@pytest.mark.parametrize(
    "override",
    [
        *("cluster.device=cuda", "cluster.device=auto", "cluster.address=10.0.0.1:6379"),
        *("backend.name=nobodys", 'cluster.secrets=["X9"]'),
    ],
)
def test_nothing_is_forked_for_gpus_or_wrong_configs(override: str) -> None:
    assert preload_of(load_config(QUICKSTART, [override])) == Preload()


def test_no_code_that_came_with_a_model_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(QUICKSTART, ["model={path='.'}", "backend.name=theirs:SPEC"])
    assert preload_of(config) == Preload()
