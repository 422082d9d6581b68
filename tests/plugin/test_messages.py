"""The message of each way in which a plugin can be amiss: of `corerl train` on the driver, and of a worker's process,
which finds another plugin under the name than its driver has."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen

from corerl.cli.main import main
from corerl.cluster.arrangement import arrange
from corerl.cluster.group import RayGroup
from corerl.cluster.placement import reserved
from corerl.cluster.runtime import ray_session
from corerl.plan.resolve import plugins_of
from corerl.plan.roles import plan_role
from corerl.plugin.registry import Kind, installed, installed_names, load
from tests.end_to_end.command import write_small
from tests.machine import paced
from tests.trainer.configs import config_for

ROOT = Path(__file__).resolve().parents[2]
SPEC = """
from corerl.plugin.spec import BackendSpec
from corerl_testing.plain.spec import PlainConfig
SPEC = BackendSpec(
    implementation="corerl_testing.plain.backend:PlainBackend", config=PlainConfig, api={api}, summary=""
)
"""


@frozen(kw_only=True)
class Case:
    """One way to be amiss. What is told is `message`, wherever."""

    source: str | None  # of the module that the entry point names; None where there is no such module
    offered_by: tuple[str, ...]  # distributions
    error: str
    message: str


CASES = {
    "unimportable": Case(
        source="import a_library_that_is_not_there",
        offered_by=("corerl-unimportable",),
        error="PluginBroken",
        message="backend 'unimportable' (corerl-unimportable 0.2) cannot be loaded from unimportable_spec:SPEC: "
        "ModuleNotFoundError: No module named 'a_library_that_is_not_there'; repair or reinstall corerl-unimportable",
    ),
    "moduleless": Case(
        source=None,
        offered_by=("corerl-moduleless",),
        error="PluginBroken",
        message="backend 'moduleless' (corerl-moduleless 0.2) cannot be loaded from moduleless_spec:SPEC: "
        "ModuleNotFoundError: No module named 'moduleless_spec'; repair or reinstall corerl-moduleless",
    ),
    "exiting": Case(
        source="raise SystemExit('no license')",
        offered_by=("corerl-exiting",),
        error="PluginBroken",
        message="backend 'exiting' (corerl-exiting 0.2) cannot be loaded from exiting_spec:SPEC: "
        "SystemExit: no license; repair or reinstall corerl-exiting",
    ),
    "wrong": Case(
        source="SPEC = 3",
        offered_by=("corerl-wrong",),
        error="PluginBroken",
        message="backend 'wrong' (corerl-wrong 0.2): wrong_spec:SPEC is a int, expected a BackendSpec; "
        "its entry point must name the spec",
    ),
    "missing": Case(
        source=None,
        offered_by=(),
        error="PluginNotFound",
        message="unknown backend 'missing'; installed: {installed}",
    ),
    "misspellt": Case(  # is called 'misspelt' where it is installed
        source=None,
        offered_by=(),
        error="PluginNotFound",
        message="unknown backend 'misspellt'; installed: {installed}; did you mean 'misspelt'?",
    ),
    "twofold": Case(
        source=SPEC.format(api="(2, 0)"),
        offered_by=("corerl-twofold", "rival"),
        error="PluginConflict",
        message=(
            "backend 'twofold' is provided by corerl-twofold 0.2 and rival 0.2; choose one by writing "
            "'corerl-twofold:twofold' or 'rival:twofold'"
        ),
    ),
    "later": Case(
        source=SPEC.format(api="(3, 0)"),
        offered_by=("corerl-later",),
        error="PluginIncompatible",
        message="backend 'later' (corerl-later 0.2) was written for API 3.0, but this corerl supports 2.0; "
        "install a release of corerl-later for API 2.0, or a corerl that supports 3.0",
    ),
    "shadowed": Case(  # stale metadata of an older version come first on sys.path
        source="import a_library_that_is_not_there",
        offered_by=("corerl-shadowed",),
        error="PluginBroken",
        message="backend 'shadowed' (corerl-shadowed 0.2) cannot be loaded from shadowed_spec:SPEC: "
        "ModuleNotFoundError: No module named 'a_library_that_is_not_there'; "
        "corerl-shadowed is found twice: 0.2 in {amiss}/corerl_shadowed-0.2.dist-info (used), "
        "0.1 in {stale}/corerl_shadowed.egg-info; repair or reinstall corerl-shadowed",
    ),
}


def distribution(site: Path, name: str, point: str, *, version: str = "0.2", egg: bool = False) -> None:
    stem = name.replace("-", "_")
    metadata = site / (f"{stem}.egg-info" if egg else f"{stem}-{version}.dist-info")
    metadata.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (metadata / ("PKG-INFO" if egg else "METADATA")).write_text(text)
    (metadata / "entry_points.txt").write_text(f"[corerl.backends]\n{point}\n")


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("stale")
    distribution(site, "corerl-shadowed", "", version="0.1", egg=True)
    return site


@pytest.fixture(scope="module")
def amiss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything is amiss."""
    site = tmp_path_factory.mktemp("amiss")
    distribution(site, "corerl-misspelt", "misspelt = misspelt_spec:SPEC")
    for name, case in CASES.items():
        for offering in case.offered_by:
            distribution(site, offering, f"{name} = {name}_spec:SPEC")
        if case.source is not None:
            (site / f"{name}_spec.py").write_text(case.source)
    distribution(site, "corerl-newer", "newer = newer_spec:SPEC", version="0.3")
    (site / "newer_spec.py").write_text(SPEC.format(api="(2, 0)"))
    return site


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of the same names are as they should be."""
    site = tmp_path_factory.mktemp("good")
    for name in (*CASES, "newer"):
        distribution(site, f"corerl-{name}", f"{name} = {name}_spec:SPEC")
        (site / f"{name}_spec.py").write_text(SPEC.format(api="(2, 0)"))
    return site


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules of one site do not stay for the next test's."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in (*CASES, "newer"):
        sys.modules.pop(f"{name}_spec", None)


@pytest.mark.parametrize("name", CASES)
def test_the_driver_says_in_one_line_what_is_amiss_with_a_backend(
    name: str,
    fresh: None,
    amiss: Path,
    stale: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    sys.path[:0] = [str(stale), str(amiss)]
    assert main(["train", str(write_small(tmp_path)), f"backend.name={name}", "roles.actor.ranks=1"]) == 2
    known = ", ".join(installed_names(Kind.BACKENDS))
    message = CASES[name].message.format(installed=known, amiss=amiss, stale=stale)
    assert capsys.readouterr().err == f"corerl: error: backend.name: {message}\n"


@pytest.fixture(scope="module")
def refusals(amiss: Path, stale: Path, good: Path, shared_ray: None) -> dict[str, tuple[str, str]]:
    """What a worker with the sites that are amiss answers to a driver with the good one, by name."""
    before = list(sys.path)
    sys.path.insert(0, str(good))
    try:
        assignments = {}
        for name in (*CASES, "newer"):
            config = config_for(name, ranks=1)
            plan = plan_role("actor", config, plugins_of(config), device="cpu")
            (assignments[name],) = plan.assignments
        environment = {"PYTHONPATH": os.pathsep.join(map(str, (stale, amiss, ROOT))), "OMP_NUM_THREADS": "1"}
        with ray_session(address="", cpus=1.0):
            with reserved(arrange({"ranks": 1}), timeout=paced(60.0)) as slots:
                group = RayGroup(["actor rank 0"], "tests.plugin.workers:Refusing", slots["ranks"], environment)
                group.wait(group.construct([()]))
                found = {name: group.call("refusal", assignment)[0] for name, assignment in assignments.items()}
                group.kill()
    finally:
        sys.path[:] = before
        for name in (*CASES, "newer"):
            sys.modules.pop(f"{name}_spec", None)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_worker_says_the_same_and_that_the_driver_has_it(
    name: str, refusals: dict[str, tuple[str, str]], fresh: None, amiss: Path, stale: Path
) -> None:
    sys.path[:0] = [str(stale), str(amiss)]
    known = ", ".join(installed_names(Kind.BACKENDS))
    message = CASES[name].message.format(installed=known, amiss=amiss, stale=stale)
    advice = "the driver could load this backend, so install it on every node"
    assert refusals[name] == (CASES[name].error, f"{message}; {advice}")


def test_a_worker_with_another_version_says_both(refusals: dict[str, tuple[str, str]]) -> None:
    error, message = refusals["newer"]
    assert error == "PluginIncompatible"
    assert message == (
        "backend 'newer' is corerl-newer 0.3, but the driver's is corerl-newer 0.2; "
        "install the same corerl and the same plugins on every node"
    )


def test_stale_metadata_without_entry_points_are_told_and_do_no_harm(fresh: None, good: Path, stale: Path) -> None:
    sys.path[:0] = [str(stale), str(good)]
    assert load(Kind.BACKENDS, "shadowed").version == "0.2"
    (listed,) = [each for each in installed(Kind.BACKENDS) if each.name == "shadowed"]
    assert listed.shadowed == (f"0.1 in {stale}/corerl_shadowed.egg-info",)
