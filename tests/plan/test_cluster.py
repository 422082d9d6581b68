"""What [cluster] accepts, and how its environment meets those that plugins ask for."""

from __future__ import annotations

import re

import pytest

from corerl.config.load import config_of, recorded
from corerl.errors import ConfigError
from corerl.plan.check import contradictions

# ---- secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.environment.API_KEY=8675309"],
        ["cluster.environment={API_KEY = 8675309}"],
        ['cluster.environment={"A=B" = "8675309"}'],
        ['cluster.environment.API_KEY={x = "8675309"}'],
        ["cluster.environment=API_KEY=8675309"],
        ['cluster.environment.API_KEY="x"', "cluster.environment.API_KEY.x=8675309"],
        ["cluster.environment.API KEY=8675309"],
        ["cluster={environment = {API_KEY = 8675309}}"],
        ["cluster.environment.API_KEY=8675309867530986753098675309"],
        ["cluster.environment.API_KEY 8675309"],
        ["cluster.'environment'.API_KEY:8675309"],
        ["cluster.enviroment.API_KEY=8675309"],
        ["environment.API_KEY=8675309"],
        ["cluster.secret.API_KEY=8675309"],
        ["cluster.env_vars.HF_TOKEN=8675309"],
        ['clustr={environment={T="8675309"}}'],
        ["cluster.vars.T=8675309867530986753098675309"],
        ["cluster.environment.T 8675309=="],
        ["cluster.address.T=8675309"],
        ["cluster.secrets=[8675309]"],
        ["roles.actor.environment.T=8675309"],
        ["roles={actor={environment={T=8675309}}}"],
        ['cluster.environment.API_KEY="8675309"', 'cluster.secrets=["API_KEY"]', "cluster.address=x"],
    ],
)
def test_a_variable_that_is_amiss_is_told_without_its_value(overrides: list[str]) -> None:
    try:
        said = "\n".join(contradictions(config_of({"backend": {"name": "plain"}}, overrides)))
    except ConfigError as error:
        said = error.message
    assert re.search("clustr|cluster|environment|roles", said, re.IGNORECASE) and "8675309" not in said


def test_variables_of_process_start_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_PRELOAD", "LD_SDK_KEY", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "s3cr3t")
    own = {"OMP_NUM_THREADS": "4", "LD_LIBRARY_PATH": "/opt/lib", "LD_API_KEY": "s3cr3t", "RAY_memory_monitor": "0"}
    table = {"environment": own, "secrets": ["LD_PRELOAD", "LD_SDK_KEY", "RAY_AUTH_TOKEN"]}
    config = config_of({"backend": {"name": "plain"}, "cluster": table})
    rays = "is for Ray, which runs before ranks and engines do; set it in the environment of this command, or of"
    found = [line for line in contradictions(config) if line.startswith("cluster.")]
    assert [line.partition(" `ray start`")[0] for line in found] == [
        f"cluster.environment: 'RAY_memory_monitor' {rays}",
        f"cluster.secrets: 'RAY_AUTH_TOKEN' {rays}",
        (
            "cluster.secrets: 'LD_PRELOAD' is read as a process starts, so that Ray gets its value and logs it; if it "
            "is no secret, set it in cluster.environment"
        ),
    ]
    written = recorded(config).cluster
    assert written.environment == {"OMP_NUM_THREADS": "4", "LD_LIBRARY_PATH": "/opt/lib"}
    assert written.secrets == ("LD_PRELOAD", "LD_SDK_KEY", "RAY_AUTH_TOKEN", "LD_API_KEY", "RAY_memory_monitor")
