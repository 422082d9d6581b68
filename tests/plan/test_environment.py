"""What the processes of a run are given before they import anything."""

from __future__ import annotations

from typing import Any

import pytest

from corerl.config.schema import ClusterConfig, ClusterInfo
from corerl.errors import ConfigError
from corerl.plan.environment import environment_of, process_environment
from corerl.plugin.registry import Kind, load


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a/users/own")


def environment(
    plugin: str = "plain",
    /,
    cluster: ClusterConfig | None = None,
    *,
    device: str = "cpu",
    transport: str = "ipc",
    **wanted: str,
) -> dict[str, str]:
    """That of a plugin which asks for what is `wanted`."""
    cluster = cluster or ClusterConfig()
    common = process_environment(cluster, device=device, transport=load(Kind.TRANSPORTS, transport))
    return environment_of(plugin, wanted, cluster=cluster, common=common)


def test_ranks_and_engines_that_meet_over_nccl_allocate_alike() -> None:
    def chosen(transport: str, placement: Any, **user: str) -> tuple[str | None, str | None]:
        cluster = ClusterConfig(placement=placement, environment=user)
        found = environment(cluster=cluster, device="cuda", transport=transport)
        return found.get("NCCL_CUMEM_ENABLE"), found.get("NCCL_NVLS_ENABLE")

    assert chosen("collective", "disaggregated") == ("0", "0")
    assert chosen("collective", "disaggregated", NCCL_CUMEM_ENABLE="1") == ("1", "0")
    assert chosen("collective", "colocated") == (None, None)  # through host memory
    assert chosen("disk", "disaggregated") == (None, None)


def test_what_the_user_gives_is_what_processes_have() -> None:
    own = ClusterConfig(environment={"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO"})
    found = environment(cluster=own, OMP_NUM_THREADS="4")
    assert (found["OMP_NUM_THREADS"], found["NCCL_DEBUG"], found["HF_HUB_OFFLINE"]) == ("4", "INFO", "1")
    engine = load(Kind.ENGINES, "transformers").spec  # repeats nothing that a run gives by itself
    wanted = engine.environment(engine.config(), ClusterInfo(device="cpu", ranks=1))
    assert environment("transformers", own, **wanted)["OMP_NUM_THREADS"] == "4"
    with pytest.raises(ConfigError, match="cluster.environment needs another value, but plain needs '1'"):
        environment(cluster=own, OMP_NUM_THREADS="1")


def test_a_secrets_value_comes_from_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cr3t")
    found = environment(cluster=ClusterConfig(environment={"NCCL_DEBUG": "INFO"}, secrets=("HF_TOKEN",)))
    assert (found["HF_TOKEN"], found["NCCL_DEBUG"]) == ("s3cr3t", "INFO")
    assert "HF_TOKEN" not in environment()
