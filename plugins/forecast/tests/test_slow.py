"""The slow paths that a run takes on GPUs are among its first lines, each with its price and what avoids it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from attrs import evolve

from corerl.config import ClusterInfo
from corerl.kinds import ModelSize
from corerl.plan import Plan
from corerl.plugin import Kind, SlowPath, load
from corerl_forecast.extension import FLOAT32
from corerl_testing import make_plan
from plugins.forecast.tests.planned import EXTENSIONS, LARGE, planned_on, predictions
from tests.driver.saved import CRITIC, DATA, config_in

GEMMA2 = {"model_type": "gemma2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
GEMMA2 |= {"num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 97}


def told(plan: Plan) -> list[str]:
    """Without what was settled, and predictions."""
    return [line for line in plan.notices if "'auto' is" not in line and line not in predictions(plan.notices)]


def planned(tmp_path: Path, *, backend: str = "deepspeed", model: dict[str, Any] | None = None, **tables: Any) -> Plan:
    """A run on GPUs of this machine, which are large."""
    table = {**DATA["model"], "config": model or LARGE}
    config = config_in(tmp_path / "run", backend={"name": backend}, extensions=EXTENSIONS, **{"model": table, **tables})
    config = evolve(config, cluster=evolve(config.cluster, device="cuda"))
    with (
        mock.patch("corerl.plan.make.resolve_device", return_value="cuda"),
        mock.patch("corerl.plan.make.has_bfloat16", return_value=True),
        mock.patch("corerl_forecast.extension.device_memory", return_value=2**40),
    ):
        return make_plan(config)


def test_a_fast_run_says_nothing(tmp_path: Path) -> None:
    assert told(planned(tmp_path)) == []


def test_float32_is_noted_with_its_price(
    tmp_path: Path,
) -> None:
    what = (
        "train.precision: float32 has neither a kernel for packed attention nor the fast matrix products of half "
        f"precision; {FLOAT32}; "
    )
    assert told(planned(tmp_path, train={"precision": "float32"})) == [f"{what}set it to 'bfloat16'"]
    with mock.patch("corerl.plan.make.has_bfloat16", return_value=False):
        plan = planned_on(0, tmp_path, backend="deepspeed")
    assert told(plan) == [f"{what}bfloat16, which the GPU or the backend lacks, would avoid it"]


def test_attention_that_no_kernel_fits_is_told_of_the_model(tmp_path: Path) -> None:
    (line,) = told(planned(tmp_path, model=GEMMA2))
    assert line == (
        "model.config: attention runs on padded rows instead of one kernel over packed tokens, because it caps its "
        "scores; a step takes 1.2 times as long; no setting avoids it, only another model"
    )


def test_a_slow_path_is_noted_once_per_table(tmp_path: Path) -> None:
    slow = {"precision": "float32"}
    assert len(told(planned(tmp_path, train=slow, **CRITIC))) == 1
    own = {"critic": {"ranks": 1, "train": slow}}
    (line,) = told(planned(tmp_path, **{**CRITIC, "roles": own}))
    assert line.startswith("roles.critic.train.precision: float32 ")


def test_slow_paths_of_a_backend_are_placed_in_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[ClusterInfo, ModelSize]] = []

    def slow(config: Any, cluster: ClusterInfo, size: ModelSize) -> Iterable[SlowPath]:
        seen.append((cluster, size))
        yield SlowPath(path="speed", text="it is low", price="a step takes 3 times as long", instead="raise it")

    def slower(kind: Kind, name: str) -> Any:
        loaded = load(kind, name)
        return evolve(loaded, spec=evolve(loaded.spec, slow=slow)) if kind is Kind.BACKENDS else loaded

    monkeypatch.setattr("corerl.plan.resolve.load", slower)
    line = "backends.deepspeed.speed: it is low; a step takes 3 times as long; raise it"
    assert told(planned(tmp_path)) == told(planned_on(2**40, tmp_path, backend="deepspeed")) == [line]
    assert [cluster.elsewhere for cluster, _ in seen] == [False, True]
    assert {cluster.device for cluster, _ in seen} == {"cuda"} and all(size.in_pieces is None for _, size in seen)
