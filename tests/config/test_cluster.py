"""What [cluster] accepts, and how its environment meets those that plugins ask for."""

from __future__ import annotations

import pytest

from corerl.config.load import structure
from corerl.config.schema import ClusterConfig
from corerl.errors import ConfigError
from corerl.plugin.options import merge_environments


def test_resources_and_environment_are_tables() -> None:
    table = {"resources": {"h200": 1, "rack-7": 0.5}, "environment": {"NCCL_DEBUG": "INFO"}, "watchdog": 5}
    config = structure(table, ClusterConfig, path="cluster")
    assert config.resources == {"h200": 1.0, "rack-7": 0.5}
    assert config.environment == {"NCCL_DEBUG": "INFO"}
    assert config.watchdog == 5.0
    assert (ClusterConfig().resources, ClusterConfig().environment, ClusterConfig().watchdog) == ({}, {}, 60.0)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (
            {"resources": {"GPU": 8}},
            "cluster.resources: must be custom Ray resources, got 'GPU', which CoreRL sets itself",
        ),
        ({"resources": {"h200": 0}}, "cluster.resources: amounts must be finite and above 0, got 'h200' = 0.0"),
        ({"resources": {"h200": "one"}}, "cluster.resources"),
        ({"environment": {"NCCL_DEBUG": 1}}, "cluster.environment"),
        ({"watchdog": -1}, "cluster.watchdog: must be at least 0"),
    ],
)
def test_what_it_cannot_be_is_one_line(table: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        structure(table, ClusterConfig, path="cluster")
    assert caught.value.message.startswith(text)
    assert "\n" not in caught.value.message


def test_a_variable_that_the_user_and_a_backend_want_differently_names_both() -> None:
    config = structure({"environment": {"NCCL_CUMEM": "1", "MINE": "2"}}, ClusterConfig, path="cluster")
    given = ("cluster.environment", config.environment)
    assert merge_environments(given, ("plain", {"NCCL_CUMEM": "1"})) == {"NCCL_CUMEM": "1", "MINE": "2"}
    with pytest.raises(ConfigError) as caught:
        merge_environments(given, ("plain", {"NCCL_CUMEM": "0"}))
    assert caught.value.message == (
        "environment variable NCCL_CUMEM: cluster.environment needs '1', but plain needs '0'; they cannot share a "
        "process, so choose one of them"
    )
