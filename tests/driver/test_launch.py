"""What the processes of a run are given; that they start, work and end is tested in tests/end_to_end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from attrs import evolve

from corerl.driver.launch import launch, process_environment, rank_environment
from corerl.driver.prepare import Prepared, prepare
from corerl.errors import ConfigError, DataError
from tests.driver.saved import make_config


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/a/users/own")
    config = make_config()
    return prepare(evolve(config, cluster=evolve(config.cluster, device="cpu")))


def test_a_process_on_a_cpu_has_one_thread_this_machines_loopback_and_no_network(
    prepared: Prepared, tmp_path: Path
) -> None:
    environment = process_environment(prepared)
    assert (environment["OMP_NUM_THREADS"], environment["GLOO_SOCKET_IFNAME"]) == ("1", "lo")
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/a/users/own"


def test_on_a_cluster_ranks_may_meet_over_any_interface(prepared: Prepared) -> None:
    config = evolve(prepared.config, cluster=evolve(prepared.config.cluster, address="10.0.0.1:6379"))
    assert "GLOO_SOCKET_IFNAME" not in process_environment(evolve(prepared, config=config))


def test_a_backend_adds_to_the_environment_and_contradicts_nothing(prepared: Prepared) -> None:
    def with_environment(**environment: str) -> Prepared:
        return evolve(prepared, actor=evolve(prepared.actor, environment=environment))

    assert rank_environment(with_environment(ITS_OWN="1"))["ITS_OWN"] == "1"
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS: corerl wants '1', plain wants '4'"):
        rank_environment(with_environment(OMP_NUM_THREADS="4"))


def test_nothing_is_written_for_a_run_that_cannot_be(tmp_path: Path) -> None:
    config = make_config(data={"source": str(tmp_path / "none.jsonl"), "held_out": 16})
    with pytest.raises(DataError, match="cannot read"):
        with launch(evolve(config, run=evolve(config.run, dir=str(tmp_path / "run")))):
            raise AssertionError("it must not come to this")
    assert not (tmp_path / "run").exists()
