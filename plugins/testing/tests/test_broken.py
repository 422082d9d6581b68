"""The conformance suite sees each fault that it is there for, and tells of that one alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from corerl.plugin import Kind, load
from corerl_testing.broken import BROKEN
from corerl_testing.subject import Runs, Subject
from corerl_testing.suite import test_gpu
from tests.forks.client import Forked
from tests.machine import wait_for_memory

pytestmark = pytest.mark.processes

GIB = 3.0  # of memory that the suite and its ranks take
PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"

# Broken backends in one process: what plain trains, which each is compared with, is trained once.
SUITE = """
import os

import pytest

from corerl_testing import with_variants
from corerl_testing.suite import *


@pytest.fixture(scope="session", params=os.environ["BACKENDS"].split())
def backend_name(request):
    return request.param


@pytest.fixture(scope="session", params=with_variants("corerl_testing.broken:FORGETS_OTHER_PAIRS"))
def backend_variant(request):
    return request.param
"""
# One model and packing of a check is enough to see a fault. A check is left out that needs what the backend declares to
# lack (it would end as unsupported), or that runs one rank where the fault is between ranks. Unless all checks are
# asked for, a backend meets the check that must see its fault, until it does.
CONFTEST = """
import gc
import os

import pytest

from corerl.plugin import Capability, Kind, load
from corerl_testing import pool
from corerl_testing.broken import BROKEN
from corerl_testing.marks import check_of
from corerl_testing.outcomes import repeated
from tests.forks import ranks

pool.forks = ranks.Context
ALL = "ALL_CHECKS" in os.environ
seen = set()  # backends whose fault has been seen


def pytest_collection_modifyitems(items):
    again = set(repeated(items))
    items[:] = [item for item in items if item not in again and wanted(item)]


def wanted(item):
    parameters, check = item.callspec.params, check_of(item.function)
    name, world_size = parameters["backend_name"], parameters.get("world_size", 0)
    variant = parameters.get("backend_variant")
    spec = load(Kind.BACKENDS, name).spec
    lacks = {each for each, support in spec.capabilities.items() if not support.full}
    if variant not in (spec.variants or (None,)) and (world_size or variant is not None):
        return False  # with variants, it is without a fault elsewhere
    if world_size == 1 and Capability.MULTI_RANK not in lacks:
        return False
    several = [Capability.MULTI_RANK] if check.level_at(world_size) > 1 else []
    if lacks & {*check.needs, *several}:
        return False
    return ALL or check.id == BROKEN[name]


@pytest.fixture(autouse=True)
def until_seen(_corerl_check, backend_name):
    if backend_name in seen:
        pytest.skip("its fault has been seen")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed and not ALL:
        seen.add(item.callspec.params["backend_name"])
    return report


def pytest_collection_finish():
    gc.freeze()  # looking for living tensors, a check passes over what was there before any backend
"""


def run_suite(request: pytest.FixtureRequest, directory: Path, **environment: str) -> dict[str, list[dict[str, Any]]]:
    """Name of a broken backend that a test of this session names -> its checks in the report of levels 0 to 2."""
    calls = [each.callspec.params for each in request.session.items if hasattr(each, "callspec")]
    names = [name for name in BROKEN if any(call.get("name") == name for call in calls)]
    wait_for_memory(GIB, "the suite with broken backends")
    arguments = ["pytest", "-q", "--tb=line", "-p", "corerl_testing.plugin", "-c", "/dev/null", "--rootdir", "."]
    arguments += ["-p", "no:cacheprovider", "--corerl-level", "2", "--corerl-report", "report.json", "test_suite.py"]
    (directory / "test_suite.py").write_text(SUITE)
    (directory / "conftest.py").write_text(CONFTEST)
    own = {**os.environ, "OMP_NUM_THREADS": "1", "BACKENDS": " ".join(names), **environment}
    with (directory / "out.txt").open("w") as out:
        process = Forked(arguments, PYTEST, environment=own, directory=directory, stdout=out, stderr=out)
    assert process.wait() == pytest.ExitCode.TESTS_FAILED, (directory / "out.txt").read_text()
    found = json.loads((directory / "report.json").read_text())
    if len(names) == 1:
        return {names[0]: found["checks"]}
    return {report["value"]: report["checks"] for report in found}


@pytest.fixture(scope="session")
def checks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run_suite(request, tmp_path_factory.mktemp("broken"))


@pytest.fixture(scope="session")
def all_checks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    return run_suite(request, tmp_path_factory.mktemp("broken"), ALL_CHECKS="1")


@pytest.mark.timeout(1200)  # the first one waits for all
@pytest.mark.parametrize("name", BROKEN)
def test_the_named_check_sees_a_broken_backends_fault(name: str, checks: dict[str, list[dict[str, Any]]]) -> None:
    assert [check["id"] for check in checks[name] if check["outcome"] == "failed"] == [BROKEN[name]], checks[name]


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", BROKEN)
def test_no_other_check_sees_a_broken_backends_fault(name: str, all_checks: dict[str, list[dict[str, Any]]]) -> None:
    outcomes = {check["outcome"] for check in all_checks[name]}
    assert {check["id"] for check in all_checks[name] if check["outcome"] == "failed"} == {BROKEN[name]}
    assert outcomes <= {"passed", "failed", "blocked", "not run"}
    assert {check["blocked_by"] for check in all_checks[name] if check["outcome"] == "blocked"} <= {BROKEN[name]}


def test_checks_on_gpus_see_numbers_that_differ(runs: Runs, tmp_path: Path) -> None:
    """Here both are a CPU's, where the plain backend passes, but has no bfloat16 to show."""

    def on_a_cpu(backend: str) -> Subject:
        return Subject(backend=backend, world_size=1, runs=runs, directory=tmp_path, lifted=True)

    forward = test_gpu.test_forward_on_gpus_gives_what_transformers_gives_on_a_cpu
    training = test_gpu.test_training_on_gpus_follows_the_plain_backend_on_a_cpu
    pictures = test_gpu.test_training_on_pictures_on_gpus_follows_the_plain_backend_on_a_cpu
    halved = test_gpu.test_bfloat16_on_gpus_stays_near_plain_on_a_cpu
    forward(on_a_cpu("plain"), "qwen3")
    training(on_a_cpu("plain"), "qwen3")
    pictures(on_a_cpu("plain"), "trained")
    with pytest.raises(AssertionError):
        halved(on_a_cpu("plain"))
    with pytest.raises(AssertionError):
        training(on_a_cpu("corerl_testing.broken:KEEPS_FIRST_RATE"), "qwen3")
    with pytest.raises(AssertionError):
        pictures(on_a_cpu("corerl_testing.broken:FREEZES_TOWERS"), "trained")
    with pytest.raises(AssertionError):
        forward(on_a_cpu("corerl_testing.broken:FORGETS_TEMPERATURE"), "qwen3")
    with pytest.raises(AssertionError):
        halved(on_a_cpu("corerl_testing.broken:FORGETS_TEMPERATURE"))


def test_every_broken_backend_says_what_is_wrong() -> None:
    specs = [load(Kind.BACKENDS, name).spec for name in BROKEN]
    assert len(BROKEN) >= 14
    assert len({spec.implementation for spec in specs}) == len(specs)
    assert all(spec.summary.startswith("wrong on purpose: ") for spec in specs)
