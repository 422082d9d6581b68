"""Layers are recomputed where training would not fit without, unless the config or the backend says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from corerl.errors import ConfigError
from corerl.plan import Plan
from corerl_elastic.sizes import resized
from corerl_forecast.forecast import GIB
from corerl_testing import make_plan
from plugins.forecast.tests.planned import LARGE, memory_on, on_gpus, planned_on, predictions
from tests.driver.saved import CRITIC, DATA


def settings(plan: Plan, role: str = "actor") -> tuple[str, str]:
    """Those that ranks get, which are those that the run's config has."""
    table = plan.record["roles"][role].get("train", plan.record["train"])
    given = plan.processes.roles[role].train
    assert (table["precision"], table["recompute"]) == (given.precision, given.recompute)
    return given.precision, given.recompute


def needed_on(there: int, tmp_path: Path, **tables: Any) -> int:
    """Bytes that training is predicted to need."""
    return memory_on(there, tmp_path, **tables).stages["train actor"].total


def test_on_gpus_layers_are_recomputed_where_memory_wants_it(tmp_path: Path) -> None:
    roomy = planned_on(80 * GIB, tmp_path)
    assert settings(roomy) == ("bfloat16", "none")
    assert roomy.notices[:2] == (
        "train.precision: 'auto' is 'bfloat16' for the actor",
        "train.recompute: 'auto' is 'none' for the actor",
    )
    assert len(predictions(roomy.notices)) == len(roomy.notices) - 2 == 1
    needed = needed_on(80 * GIB, tmp_path)
    tight = planned_on(needed, tmp_path)
    assert settings(tight) == ("bfloat16", "full")
    assert tight.notices[0] == "train.recompute: 'auto' is 'full' for the actor"
    assert len(predictions(tight.notices)) == len(tight.notices) - 2 == 1
    assert needed_on(needed, tmp_path) < 0.9 * needed
    unknown = planned_on(0, tmp_path)
    assert settings(unknown) == ("bfloat16", "none")


def test_a_resized_run_chooses_anew(tmp_path: Path) -> None:
    needed = needed_on(80 * GIB, tmp_path)
    tight = planned_on(needed, tmp_path)
    assert settings(resized(tight, ["roles.actor.ranks=1"])) == ("bfloat16", "none")  # as nothing is known of its GPUs


def test_what_another_extension_sets_is_counted(tmp_path: Path) -> None:
    there = round(1.15 * needed_on(200 * GIB, tmp_path))
    alone = planned_on(there, tmp_path)
    larger = {"settings": {"train.tokens_per_micro_batch": 32768}}
    first = {"name": "tests.plan.planners:FIRST", "options": larger}
    config = on_gpus(tmp_path, model={**DATA["model"], "config": LARGE}, extensions=[first])
    with mock.patch("corerl_forecast.extension.device_memory", return_value=there):
        both = make_plan(config)
    assert (settings(alone)[1], settings(both)[1]) == ("none", "full")
    chosen = [line for line in both.notices if "recompute" in line]
    assert chosen == ["train.recompute: 'auto' is 'full' for the actor"]
    (line,) = predictions(both.notices)
    assert "activations of 32,768 tokens" in line


def test_layers_are_not_recomputed_where_the_backend_as_configured_cannot(tmp_path: Path) -> None:
    tables = {
        "backend": "megatron",
        "backends": {"megatron": {"recompute_method": "uniform", "recompute_layers": 3}},
    }
    tight = planned_on(needed_on(200 * GIB, tmp_path, **tables), tmp_path, **tables)
    assert settings(tight) == ("bfloat16", "none")


def test_what_is_asked_for_stays(tmp_path: Path) -> None:
    asked = {"precision": "float32", "recompute": "none"}
    plan = planned_on(200 * GIB, tmp_path, train=asked)
    assert settings(plan) == ("float32", "none") and not any("'auto' is" in line for line in plan.notices)
    there = round(needed_on(200 * GIB, tmp_path, train=asked) / 1.2)
    with pytest.raises(ConfigError, match=r"roles\.actor\.ranks: training needs .* set train\.recompute='full' \("):
        planned_on(there, tmp_path, train=asked)


def test_roles_that_differ_are_planned_as_chosen(tmp_path: Path) -> None:
    tables = {**CRITIC, "roles": {"critic": {"ranks": 8}}, "cluster": {"placement": "disaggregated"}}
    needed = needed_on(200 * GIB, tmp_path, **tables)
    plan = planned_on(needed, tmp_path, **tables)
    assert settings(plan) == ("bfloat16", "full") and settings(plan, "critic") == ("bfloat16", "none")
