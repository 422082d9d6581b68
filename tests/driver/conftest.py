"""A run that is ready to start, in a directory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from corerl.driver.prepare import Prepared, prepare
from tests.driver.saved import make_config


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/a/users/own")
    config = make_config()
    return prepare(evolve(config, cluster=evolve(config.cluster, device="cpu")))
