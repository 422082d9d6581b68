"""What tests of core and of plugins share."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

pytest_plugins = ["corerl.testing.plugin"]

pytest.register_assert_rewrite("tests.bare_loop")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist uses what its controller has chosen
        os.environ["CORERL_TEST_FORKS"] = tempfile.mkdtemp(prefix="corerl-")  # short: a socket's path has 108 bytes
        os.environ["CORERL_TEST_FORKS_OWNER"] = str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ["RAY_AUTH_MODE"] = "disabled"  # else a token is asked of whoever joins a Ray that is there


@pytest.fixture(scope="module")
def shared_ray() -> Iterator[None]:
    """In this module `ray_session` joins the Ray that the test process has, whose workers are forked."""
    from tests.forks import ray

    with ray.joined(ray.shared().address):
        yield


@pytest.fixture(scope="module")
def seats(shared_ray: None) -> Iterator[Mapping[str, Any]]:
    """Of the conformance suite's checks under Ray."""
    from corerl.testing import groups

    with groups.seats() as seats:
        yield seats


def pytest_unconfigure(config: pytest.Config) -> None:
    if "tests.forks.ray" in sys.modules:
        sys.modules["tests.forks.ray"].close()
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["CORERL_TEST_FORKS"])
