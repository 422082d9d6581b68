"""What the processes of a run are given before they import anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.config.schema import ClusterInfo
from corerl.driver.environment import environment_of, process_environment
from corerl.driver.prepare import Prepared
from corerl.errors import ConfigError
from corerl.plugin.registry import Kind, load


def test_a_process_on_a_cpu_has_one_thread_this_machines_loopback_and_no_network(
    prepared: Prepared, tmp_path: Path
) -> None:
    environment = process_environment(prepared)
    assert (environment["OMP_NUM_THREADS"], environment["GLOO_SOCKET_IFNAME"]) == ("1", "lo")
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PYTHONPATH"] == "/a/users/own"  # without the working directory, which comes last


def test_on_a_cluster_ranks_may_meet_over_any_interface(prepared: Prepared) -> None:
    config = evolve(prepared.config, cluster=evolve(prepared.config.cluster, address="10.0.0.1:6379"))
    assert "GLOO_SOCKET_IFNAME" not in process_environment(evolve(prepared, config=config))


def test_ranks_and_engines_that_meet_over_nccl_allocate_alike(prepared: Prepared) -> None:
    def chosen(transport: str, placement: Any, **user: str) -> tuple[str | None, str | None]:
        cluster = evolve(prepared.config.cluster, placement=placement, environment=user)
        plan, config = evolve(prepared.plan, transport=transport), evolve(prepared.config, cluster=cluster)
        on_gpus = evolve(prepared, device="cuda", plan=plan, config=config)
        found = environment_of(on_gpus, "plain", {})
        return found.get("NCCL_CUMEM_ENABLE"), found.get("NCCL_NVLS_ENABLE")

    assert chosen("collective", "disaggregated") == ("0", "0")
    assert chosen("collective", "disaggregated", NCCL_CUMEM_ENABLE="1") == ("1", "0")
    assert chosen("collective", "colocated") == (None, None)  # through host memory
    assert chosen("disk", "disaggregated") == (None, None)


def test_a_backend_adds_to_the_environment_and_contradicts_nothing(prepared: Prepared) -> None:
    def environment(**own: str) -> dict[str, str]:
        return environment_of(prepared, "plain", own)

    assert environment(ITS_OWN="1")["ITS_OWN"] == "1"
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS: corerl needs '1', but plain needs '4'"):
        environment(OMP_NUM_THREADS="4")


def test_what_the_user_gives_is_what_processes_have(prepared: Prepared) -> None:
    cluster = evolve(prepared.config.cluster, environment={"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO"})
    own = evolve(prepared, config=evolve(prepared.config, cluster=cluster))
    found = environment_of(own, "plain", {"OMP_NUM_THREADS": "4"})
    assert (found["OMP_NUM_THREADS"], found["NCCL_DEBUG"], found["HF_HUB_OFFLINE"]) == ("4", "INFO", "1")
    engine = load(Kind.ENGINES, "transformers").spec  # repeats nothing that a run gives by itself
    assert environment_of(own, "transformers", engine.environment(engine.config(), ClusterInfo(device="cpu", ranks=1)))
    with pytest.raises(ConfigError, match="cluster.environment needs another value, but plain needs '1'"):
        environment_of(own, "plain", {"OMP_NUM_THREADS": "1"})


def test_a_secret_has_the_value_that_it_has_where_the_run_starts(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cr3t")
    cluster = evolve(prepared.config.cluster, environment={"NCCL_DEBUG": "INFO"}, secrets=("HF_TOKEN",))
    found = environment_of(evolve(prepared, config=evolve(prepared.config, cluster=cluster)), "plain", {})
    assert (found["HF_TOKEN"], found["NCCL_DEBUG"]) == ("s3cr3t", "INFO")
    assert "HF_TOKEN" not in environment_of(prepared, "plain", {})
