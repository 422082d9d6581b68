"""What a role's ranks alone are planned as, and what is refused before one of them starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from corerl.config.load import as_config
from corerl.errors import PluginIncompatible, UserError
from corerl.plan.group import plan_group
from corerl.plan.plan import GroupPlan
from corerl.plugin import registry
from corerl.plugin.origins import require_met
from corerl.plugin.registry import Kind
from tests.driver.saved import DATA, TEACHER, make_config, make_model, save

ALONE = {"backend": {"name": "plain"}, "model": {"config": DATA["model"]["config"]}}  # without tokenizer or prompts


def planned(role: str = "actor", resume: str = "", **tables: Any) -> GroupPlan:
    return plan_group(as_config({**ALONE, **tables}), role, resume=resume)


def lines(role: str = "actor", resume: str = "", **tables: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        planned(role, resume, **tables)
    return [line.split(";")[0] for line in caught.value.message.splitlines()]


def test_a_group_on_gpus_is_settled_as_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("corerl.plan.models.require_memory", lambda model: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    for cluster in ({}, {"device": "cuda", "address": "10.0.0.1:6379"}):
        plan = planned(backend={"name": "fsdp"}, cluster=cluster)
        given = plan.role.assignments[0].config
        assert (given.device, given.train.precision, given.train.recompute) == ("cuda", "bfloat16", "none")


def test_ranks_alone_need_no_engine_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    scan = registry.scan
    monkeypatch.setattr(registry, "scan", lambda kind: [] if kind is Kind.ENGINES else scan(kind))
    assert planned(rollout={"engine": "none-here"}).processes.engine is None


def test_a_teacher_has_no_loss_and_resumes_from_nothing() -> None:
    plan = planned("teacher", **TEACHER)
    assert plan.role.objective is None and plan.role.assignments[0].config.frozen
    (line,) = lines("teacher", resume="run/checkpoints/step-00000050/teacher", **TEACHER)
    assert line.endswith("/teacher', but the teacher is frozen, and no checkpoint holds it")


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"role": "referee"}, ["unknown role 'referee'"]),
        ({"role": "critic"}, ["roles.critic: missing"]),
        ({"cluster": {"resources": {"h200": 1}}, "model": {"path": "/none"}}, ["cluster.resources", "model.path"]),
        ({"backend": {"name": "plian"}}, ["backend.name"]),
        ({"resume": "/none/actor"}, ["resume: no directory '/none/actor'"]),
        ({"train": {"precision": "bfloat16"}}, ["train.precision = 'bfloat16' requires 'bfloat16'"]),
    ],
)
def test_what_cannot_be_is_told_before_a_process_starts(tables: dict[str, Any], expected: list[str]) -> None:
    found = sorted(lines(**tables))
    assert [line.startswith(start) for line, start in zip(found, sorted(expected), strict=True)] == [True] * len(found)


def test_a_group_whose_requirements_are_not_met_does_not_begin(
    old_tomli_w: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corerl.plan.make.require_met", require_met)
    with pytest.raises(PluginIncompatible) as caught:
        planned()
    assert caught.value.message == old_tomli_w


def test_a_group_resumes_from_its_part_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    checkpoint = save(tmp_path, config, make_model(config, seed=1), step=4)
    part = str(checkpoint / "actor")
    monkeypatch.chdir(checkpoint)
    for given in (part, "actor"):  # ranks may have another working directory
        assert planned(resume=given).role.assignments[0].config.resume == part
    assert lines(resume=str(checkpoint)) == [f"resume: {str(checkpoint)!r} is a whole checkpoint"]
    wider = {"config": {**DATA["model"]["config"], "intermediate_size": 96}}
    (line,) = lines(resume=part, model=wider)
    assert "mlp" in line and "this run's actor needs [" in line
