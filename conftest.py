"""What tests of core and of plugins share."""

import contextlib
import functools
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

# Before torch reads it: threads that wait for each other take the cores from the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# And what shapes an operator gives: to keep that takes a third of a compilation, and each is seen once here.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

from corerl_testing import pool
from corerl_testing.marks import MARK
from corerl_testing.outcomes import repeated
from tests import machine
from tests.forks import server
from tests.nightly import is_seen_elsewhere

pytest_plugins = ["corerl_testing.plugin"]

pytest.register_assert_rewrite("tests.bare_loop", "tests.engines.models")

# Fixtures of tests that start processes: ranks, Ray, a command.
STARTING = {
    *("forked_python", "forked_servers", "rank_pool", "rank_sets", "runs", "subject", "slots", "shared_ray"),
    "uninterrupted",
}
# The files that take longest begin first, so that no process ends long after the others.
LONGEST = [
    "plugins/fsdp/tests/test_conformance.py",
    "plugins/deepspeed/tests/test_conformance.py",
    "plugins/megatron/tests/test_conformance.py",
    "tests/cluster/test_group.py",
    "tests/end_to_end/test_modes.py",
    "tests/end_to_end/test_resume.py",
    "plugins/testing/tests/test_broken.py",
    "plugins/agents/tests/test_nodes.py",
    "tests/rollout/test_reward_processes.py",
    "tests/cluster/test_existing_cluster.py",
    "tests/end_to_end/test_ray_deaths.py",
    "plugins/megatron/tests/test_lora.py",
]


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # what is imported to collect the tests stays
    if hasattr(os, "SCHED_BATCH"):
        # What wakes up takes no core from what runs, in this process and in all that are started. Gloo's thread polls
        # for as long as another thread of its rank holds a lock: where it takes the core of that one, both wait.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    config.addinivalue_line("markers", "processes: it starts processes; `make test-fast` leaves it out")
    config.addinivalue_line("markers", "nightly: it repeats at greater cost what a test of `make test` sees")
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist uses what its controller has chosen
        os.environ["CORERL_TEST_FORKS"] = tempfile.mkdtemp(prefix="corerl-")  # short: a socket's path has 108 bytes
        os.environ["CORERL_TEST_FORKS_OWNER"] = str(os.getpid())
        os.environ[machine.PACE] = str(machine.measure())
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each rank that compiles starts processes
        os.environ["RAY_AUTH_MODE"] = "disabled"  # else a token is asked of whoever joins a Ray that is there
    config.pluginmanager.register(Unmarked())
    pool.TIMEOUT_SECONDS = machine.paced(pool.TIMEOUT_SECONDS)
    from tests.forks import client, ranks  # deadlines have their pace by now

    pool.forks = ranks.Context
    if getattr(config.option, "numprocesses", None) and "not processes" not in config.option.markexpr:
        client.connect().close()  # it imports while the workers of pytest-xdist collect


def pytest_report_header() -> str:
    return f"corerl deadlines: {machine.paced(1.0):.1f} times the usual, {machine.available():.1f} GiB free"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    usual = float(config.getini("timeout") or 0)
    for item in items:
        own = item.get_closest_marker("timeout")
        item.add_marker(pytest.mark.timeout(machine.paced(own.args[0] if own else usual)), append=False)
        if STARTING.intersection(getattr(item, "fixturenames", ())) or item.get_closest_marker(MARK):
            item.add_marker("processes")
    others = [item for item in items if item.path.name == "test_conformance.py"]  # of backends other than plain
    of_plain = [item for item in items if item.path.name == "test_plain.py"]
    for item in {*repeated(others), *filter(is_seen_elsewhere, others), *repeated(of_plain)}:
        item.add_marker("nightly")
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def pytest_collection_finish() -> None:
    """What is there by now would be looked through again and again, and is never garbage; what tests import is looked
    through seldom."""
    gc.freeze()
    gc.set_threshold(*server.SELDOM)
    gc.enable()


class Unmarked:
    """Sees processes that start in a test without the mark, which would slow `make test-fast` down.

    No audit hook: where there is one, `id` takes ten times as long, which every hash of a tensor and every copy calls.
    """

    def __init__(self) -> None:
        from tests.forks import client  # as above

        self.watching = False
        self.started: list[str] = []
        self.see(subprocess.Popen, "__init__", "subprocess.Popen")
        self.see(os, "fork", "os.fork")
        self.see(os, "posix_spawn", "os.posix_spawn")
        self.see(client, "connect", "tests.forks")

    def see(self, owner: Any, name: str, what: str) -> None:
        starts = getattr(owner, name)

        @functools.wraps(starts)
        def start(*args: Any, **named: Any) -> Any:
            if self.watching:
                given = [each for each in args if not isinstance(each, subprocess.Popen)]  # it has no repr yet
                self.started.append(f"{what} {given}"[:200])
            return starts(*args, **named)

        setattr(owner, name, start)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        yield from self.watch(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield from self.watch(item)

    def watch(self, item: pytest.Item) -> Iterator[None]:
        self.started.clear()
        # On a GPU, Triton's compilers are processes too.
        self.watching = item.get_closest_marker("processes") is None and not os.path.exists("/dev/nvidiactl")
        try:
            yield
        finally:
            self.watching = False
        if self.started:
            pytest.fail(f"it starts processes without pytest.mark.processes: {self.started[0]}", pytrace=False)


def pytest_unconfigure(config: pytest.Config) -> None:
    if "tests.forks.ray" in sys.modules:
        sys.modules["tests.forks.ray"].close()
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["CORERL_TEST_FORKS"])


@contextlib.contextmanager
def forking_python() -> Iterator[None]:
    """Python programs that are started by module or code are forked, and so are those that these start."""
    from tests.forks import client

    client.connect().close()  # programs take the server to be there
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(server.FORK_PYTHON, "1")
        patch.setattr(subprocess.Popen, "__init__", server.forking(subprocess.Popen.__init__))
        yield


@pytest.fixture
def forked_python() -> Iterator[None]:
    """In this test."""
    with forking_python():
        yield


@pytest.fixture(scope="module")
def forked_servers() -> Iterator[None]:
    """In this module."""
    with forking_python():
        yield


@pytest.fixture(scope="module")
def shared_ray() -> Iterator[None]:
    """In this module `ray_session` joins the Ray that the test process has, whose workers are forked."""
    from tests.forks import ray

    with ray.joined(ray.shared().address):
        yield


@pytest.fixture(scope="module")
def slots(shared_ray: None) -> Iterator[Mapping[str, Any]]:
    """Of the conformance suite's checks under Ray."""
    from corerl_testing import groups

    with groups.slots() as slots:
        yield slots
