"""A cluster's address that is wrong; sessions that start are in test_group.py."""

from __future__ import annotations

import socket

import pytest

from corerl.cluster.runtime import ray_session
from corerl.errors import ConfigError


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_where_nobody_listens_is_refused_before_ray_begins_to_wait(prefix: str) -> None:
    address = f"{prefix}127.0.0.1:{closed_port()}"
    with pytest.raises(ConfigError) as caught:
        with ray_session(address=address, cpus=1):
            pass
    assert caught.value.message == (
        f"cluster.address: no Ray cluster at '{address}' ([Errno 111] Connection refused); give the host:port that "
        "`ray start --head` printed, or leave it empty to start Ray on this machine"
    )


@pytest.mark.parametrize("port", ["6379x", "70000"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match=rf"^cluster.address: no Ray cluster at '127.0.0.1:{port}' "):
        with ray_session(address=f"127.0.0.1:{port}", cpus=1):
            pass
