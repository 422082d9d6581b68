from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from attrs import evolve

from corerl.plan import make
from corerl.plan.make import make_plan
from corerl.plan.plan import Plan
from tests.driver.saved import DATA, config_in

pytestmark = pytest.mark.usefixtures("only_listed")


def told(plan: Plan) -> list[str]:
    """Without what was settled."""
    return [line for line in plan.notices if "'auto' is" not in line]


def planned(tmp_path: Path, **tables: Any) -> Plan:
    """A run on GPUs of this machine."""
    config = config_in(tmp_path / "run", backend={"name": "deepspeed"}, **tables)
    config = evolve(config, cluster=evolve(config.cluster, device="cuda"))
    with (
        mock.patch.object(make, "resolve_device", return_value="cuda"),
        mock.patch.object(make, "has_bfloat16", return_value=True),
        mock.patch.object(make, "device_memory", return_value=2**40),
    ):
        return make_plan(config)


@pytest.mark.parametrize(
    ("source", "tables", "wanted"),
    [
        ("streamed", {"algorithm": {"kl_coef": 0.1}}, ["algorithm.kl_coef = 0.1 (its reference is a snapshot)"]),
        ("streamed", {"algorithm": {"kl_coef": 0.1}, "roles": {"reference": {}}}, []),
        ("streamed", {"algorithm": {}}, []),
        ("synchronous", {"algorithm": {"kl_coef": 0.1}}, []),
    ],
)
def test_snapshots_of_streamed_batches_are_noted(
    tmp_path: Path, source: str, tables: dict[str, Any], wanted: list[str]
) -> None:
    rollout = {**DATA["rollout"], "source": source}
    lines = told(planned(tmp_path, rollout=rollout, cluster={"offload": "never"}, **tables))
    assert [line.partition(": with rollout.source='streamed'")[0] for line in lines] == wanted
    assert all("[roles.reference]" in line for line in lines)


@pytest.mark.parametrize(
    ("place", "estimator", "gradient"),
    [
        (
            "loss",
            "k3-differentiated",
            "KL(reference || policy), and after the first optimizer step on a batch of neither",
        ),
        ("reward", "k2", "the mean of k2 - KL(policy || reference), which can lead away from the reference"),
        ("reward", "k3", "KL(policy || reference) - KL(reference || policy), which can lead away from the reference"),
        *(("loss", estimator, "") for estimator in ("k1", "k2", "k3", "")),
        *(("reward", estimator, "") for estimator in ("k1", "")),
    ],
)
def test_a_penalty_with_another_gradient_than_the_kls_is_named(
    tmp_path: Path, place: str, estimator: str, gradient: str
) -> None:
    given = {"kl_coef": 0.1, "kl_in": place, **({"kl_estimator": estimator} if estimator else {})}
    lines = make_plan(config_in(tmp_path / "run", algorithm=given)).notices
    assert [line for line in lines if line.startswith("algorithm.")] == [
        f"algorithm.kl_estimator: {estimator!r} with algorithm.kl_in={place!r}: the penalty's gradient is that of "
        f"{each}; remove it for that of KL(policy || reference)"
        for each in [gradient]
        if each
    ]
