"""What the doctor asks of a config's nodes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import asdict, evolve

from corerl.cluster import ray_session
from corerl.config import config_of
from corerl.plugin import Kind, Level, plugins_here
from corerl_doctor import run
from corerl_doctor.run import named_by, origins

FSDP = [(Kind.BACKENDS, "fsdp")]
HERE = origins(plugins_here([("backends", "fsdp")]))


@pytest.mark.parametrize("transport", ["delta", "auto"])
def test_nodes_need_what_runs_in_ranks_and_engines(transport: str) -> None:
    rollout, weights = {"engine": "fake", "sampler": "episodes"}, {"transport": transport}
    tables = {"backend": {"name": "fsdp"}, "rollout": rollout, "extensions": [{"name": "elastic"}]}
    config = config_of({**tables, "weights": weights})
    ranks: Any = SimpleNamespace(assignments=[SimpleNamespace(extensions=[SimpleNamespace(name="nan-guard")])])
    plan: Any = SimpleNamespace(processes=SimpleNamespace(roles={"actor": ranks}, transport="delta"))
    assert named_by(plan, config) == [
        (Kind.BACKENDS, "fsdp"),
        (Kind.ENGINES, "fake"),
        (Kind.ALGORITHMS, "grpo"),
        (Kind.TRANSPORTS, "delta"),
        (Kind.EXTENSIONS, "nan-guard"),
    ]


@pytest.mark.processes
def test_a_node_with_the_same_plugins_is_well(shared_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ray_session", lambda **given: ray_session(**given | {"address": ""}))  # joins that
    (found,) = run._nodes(FSDP, {}, "10.0.0.1:6379")
    assert found.level is Level.OK
    assert found.what.endswith(f") has what the driver has: {', '.join(map(str, HERE))}")


def test_a_node_with_other_plugins_is_told_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    core, fsdp = HERE
    there = {"older": evolve(fsdp, version="0.0.9"), "lacking": evolve(fsdp, problem="unknown backend 'fsdp'")}
    answers = [SimpleNamespace(node=node, value=[asdict(core), asdict(each)], error="") for node, each in there.items()]
    answers.append(SimpleNamespace(node="bare", value=None, error="ModuleNotFoundError: No module named 'corerl'"))
    monkeypatch.setattr(run, "ray_session", lambda **_: nullcontext())
    monkeypatch.setattr(run, "ask_each_node", lambda *_, **__: answers)
    found = list(run._nodes(FSDP, {}, "10.0.0.1:6379"))
    install = f"there: python -m pip install corerl-fsdp=={fsdp.version}"
    unlike = "does not have what the driver has"
    older = f"backend 'fsdp' is corerl-fsdp 0.0.9, but the driver's is corerl-fsdp {fsdp.version}"
    bare = "there: python -m pip install " + " ".join(each.requirement for each in (core, fsdp))
    assert [(each.level, each.what, each.fix) for each in found] == [
        (Level.ERROR, f"node older {unlike}: {older}", install),
        (Level.ERROR, f"node lacking {unlike}: unknown backend 'fsdp'", install),
        (Level.ERROR, "node bare cannot report what is installed: ModuleNotFoundError: No module named 'corerl'", bare),
    ]
