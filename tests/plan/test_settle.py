from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.messages import install_hint
from corerl.plan.make import make_plan
from corerl.plan.plan import Plan
from corerl.plan.settle import with_sizes
from tests.driver.saved import CRITIC, TEACHER, config_in, make_config

pytestmark = pytest.mark.usefixtures("only_listed")


def on_gpus(tmp_path: Path, *, backend: str = "fsdp", **tables: Any) -> Plan:
    """A run on the GPUs of a cluster, which is not asked anything."""
    config = config_in(tmp_path / "run", backend={"name": backend}, extensions=[{"name": "advice"}], **tables)
    return make_plan(evolve(config, cluster=evolve(config.cluster, device="cuda", address="10.0.0.1:6379")))


def settings(plan: Plan, role: str = "actor") -> tuple[str, str]:
    """Those that ranks get, which are those that the run's config has."""
    table = plan.record["roles"][role].get("train", plan.record["train"])
    given = plan.processes.roles[role].train
    assert (table["precision"], table["recompute"]) == (given.precision, given.recompute)
    return given.precision, given.recompute


def test_on_gpus_nothing_is_recomputed_unless_an_extension_chooses(tmp_path: Path) -> None:
    plan = on_gpus(tmp_path)
    assert settings(plan) == ("bfloat16", "none")
    precision, recompute = plan.notices
    assert precision == "train.precision: 'auto' is 'bfloat16' for the actor"
    assert recompute == (
        f"train.recompute: 'auto' is 'none' for the actor; {install_hint('forecast')} to have it chosen by the memory "
        "that training needs"
    )
    asked = on_gpus(tmp_path, train={"recompute": "none"})
    cannot = on_gpus(tmp_path, backend="plain")
    assert asked.notices == plan.notices[:1] and cannot.notices[-1].endswith("'auto' is 'none' for the actor")


def test_a_role_that_is_only_passed_shares_the_table_of_training(tmp_path: Path) -> None:
    plan = on_gpus(tmp_path, train={"recompute": "full"}, **TEACHER)
    assert plan.processes.roles["actor"].train.recompute == "full" and "train" not in plan.record["roles"]["teacher"]


def test_a_role_without_bfloat16_gets_its_own_settings(tmp_path: Path) -> None:
    roles = {"critic": {"ranks": 1, "backend": "plain"}}
    plan = on_gpus(tmp_path, **{**CRITIC, "roles": roles})
    assert settings(plan) == ("bfloat16", "none") and settings(plan, "critic") == ("float32", "none")


@pytest.mark.parametrize(
    ("named", "backend", "options"),
    [
        ("", "", {"sync": "last"}),
        ("", "fsdp", {"sync": "last"}),
        ("fsdp", "fsdp", {"sync": "last"}),
        ("", "megatron", None),
    ],
)
def test_a_resized_role_keeps_its_options_with_its_backend(named: str, backend: str, options: Any) -> None:
    actor = {"ranks": 2, "backend": named, "options": {"sync": "last"}}
    config = make_config(backend={"name": "fsdp"}, roles={"actor": actor})
    assert with_sizes(config, "actor", ranks=1, backend=backend).roles.actor.options == options
