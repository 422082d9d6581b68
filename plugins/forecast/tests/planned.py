"""Runs on GPUs, planned with the forecast, and what it reads of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from attrs import evolve

from corerl.config import Config
from corerl.plan import Plan, PlanReady
from corerl.plugin import ExtensionSpec, NoOptions, Process
from corerl_forecast.forecast import Forecast, Forecaster
from corerl_testing import make_plan
from tests.driver.saved import DATA, config_in

# Four layers of the 8B shape.
LARGE = {
    **DATA["model"]["config"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
SEEN: list[PlanReady] = []


class Seeing:
    """Keeps what extensions are asked about."""

    def __init__(self, *, options: Any, run_dir: str) -> None:
        pass

    def plan_ready(self, plan: PlanReady) -> None:
        SEEN.append(plan)


SEES = ExtensionSpec(
    implementation="plugins.forecast.tests.planned:Seeing",
    config=NoOptions,
    api=(2, 0),
    summary="keeps what it is asked about",
    process=Process.DRIVER,
    plans=True,
)
EXTENSIONS = [{"name": "plugins.forecast.tests.planned:SEES"}]  # the forecast takes part by itself


def on_gpus(tmp_path: Path, *, backend: str = "fsdp", **tables: Any) -> Config:
    """Of a run on the GPUs of a cluster, which is not asked anything. Layers are not compiled, as each takes seconds to
    measure, unless `tables` say so."""
    known = {"extensions": EXTENSIONS, "backends": {"fsdp": {"compile": False}}}
    config = config_in(tmp_path / "run", backend={"name": backend}, **{**known, **tables})
    return evolve(config, cluster=evolve(config.cluster, device="cuda", address="10.0.0.1:6379"))


def planned_on(there: int, tmp_path: Path, **tables: Any) -> Plan:
    """A run on GPUs of `there` bytes."""
    with mock.patch("corerl_forecast.extension.device_memory", return_value=there):
        return make_plan(on_gpus(tmp_path, **{"model": {**DATA["model"], "config": LARGE}, **tables}))


def forecaster_of(config: Config) -> Forecaster:
    make_plan(config)
    return Forecaster(SEEN.pop())


def memory_of(config: Config) -> Forecast:
    return forecaster_of(config).forecast()


def memory_on(there: int, tmp_path: Path, **tables: Any) -> Forecast:
    """Predicted of the plan that `planned_on` returns."""
    planned_on(there, tmp_path, **tables)
    return Forecaster(SEEN.pop()).forecast()


def predictions(notices: Sequence[str]) -> list[str]:
    return [line for line in notices if line.startswith("predicted memory of a device: ")]
