"""A run that is ready to start, in a directory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from corerl.plan.make import make_plan
from corerl.plan.plan import Plan
from tests.driver.saved import make_config
from tests.models.conftest import load as load
from tests.models.conftest import tiny_model as tiny_model
from tests.models.conftest import tiny_models as tiny_models


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/a/users/own")
    config = make_config()
    return make_plan(evolve(config, cluster=evolve(config.cluster, device="cpu")))
