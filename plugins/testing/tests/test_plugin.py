"""How checks end: a small suite of checks that pass and fail as they are told, run by the plugin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUITE = """
import pytest
from corerl.plugin import Capability
from corerl_testing.marks import check

@check("C05", level=1, builds_on=["C04"])
def test_last(): assert False

@check("C04", level=1, builds_on=["C03"])
def test_middle(): assert False

@check("C03", level=1, builds_on=["C02"])
def test_root(): assert False, "it is this one"

@check("C02", level=1, builds_on=["C01"])
def test_first(): pass

@check("C01", level=0)
def test_lowest(): pass

@check("C06", level=1, needs=[Capability.BFLOAT16])
def test_lacks(): assert False

@check("C07", level=1, needs=[Capability.BFLOAT16])
def test_can_all_the_same(): pass

@check("C08", level=1)
def test_known_to_fail(): assert False

@check("C14", level=1, builds_on=["C08"])
def test_on_what_is_known_to_fail(): assert False

@check("C09", level=1)
def test_has_nothing_to_see(): pytest.skip("nothing here")

@check("C10", level=4)
def test_above(): assert False

@check("C11", level=1)
def test_on_ranks(world_size): assert world_size == 2

@check("C12", level=1, builds_on=["C11"])
def test_on_ranks_too(world_size): pass

@check("C13", level=1)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_of_a_kind(kind): pass

@check("C15", level=1)
def test_what_has_the_same_cause(): assert False, "it is this one"

def test_of_someone_else(): pass
"""


WITH_VARIANTS = """
import pytest
from corerl_testing import with_variants
from corerl_testing.marks import check

@check("C43", level=1, builds_on=["C42"], variants={})
def test_what_builds_on_training(world_size, backend_variant): pass

@check("C41", level=1, builds_on=["C42"], variants={"kind": "small"})
@pytest.mark.parametrize("kind", ["large", "small"])
def test_training(world_size, kind, backend_variant):
    assert backend_variant is None, f"{kind} with {backend_variant.name}"

@check("C42", level=1)
def test_what_options_do_not_change(world_size): pass
"""
BACKEND = "corerl_testing.broken:FORGETS_OTHER_PAIRS"  # whose spec has a variant on four ranks
IN_THE_FILE = f"""
@pytest.fixture(scope="session")
def backend_name(): return {BACKEND!r}

@pytest.fixture(scope="session", params=with_variants({BACKEND!r}))
def backend_variant(request): return request.param
"""


def run(
    directory: Path, *arguments: str, suite: str = SUITE, backend: str = "plain"
) -> tuple[int, str, dict[str, Any]]:
    (directory / "test_suite.py").write_text(suite)
    report = directory / "report.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "corerl_testing.plugin", "-p", "no:cacheprovider"]
    command += ["-c", "/dev/null", "--rootdir", ".", "--corerl-backend", backend, "--corerl-report", str(report)]
    command += [*arguments, "test_suite.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory, check=False)
    return done.returncode, done.stdout + done.stderr, json.loads(report.read_text()) if report.exists() else {}


@pytest.mark.usefixtures("forked_python")
def test_each_check_has_its_outcome(tmp_path: Path) -> None:
    (tmp_path / "expected.toml").write_text("C08 = 'see our tracker'\n")
    status, out, report = run(tmp_path, "--corerl-expected-failures", "expected.toml")
    assert status == 1
    found = {(each["id"], each["parameters"]): each for each in report["checks"]}
    assert {key: each["outcome"] for key, each in found.items()} == {
        ("C01", ""): "passed",
        ("C02", ""): "passed",
        ("C03", ""): "failed",
        ("C04", ""): "blocked",
        ("C05", ""): "blocked",
        ("C06", ""): "unsupported",
        ("C07", ""): "failed",
        ("C08", ""): "expected",
        ("C09", ""): "not run",
        ("C11", "on 1 rank(s)"): "failed",
        ("C11", "on 2 rank(s)"): "blocked",  # what fails on one rank says nothing on two
        ("C12", "on 1 rank(s)"): "blocked",
        ("C12", "on 2 rank(s)"): "blocked",
        ("C14", ""): "blocked",  # without an expectation of its own
        ("C15", ""): "failed",
        ("C13", "qwen3"): "passed",
        ("C13", "qwen3-moe"): "passed",
    }
    blocked_by = {id_: found[id_, ""]["blocked_by"] for id_ in ("C04", "C05", "C14")}
    assert blocked_by == {"C04": "C03", "C05": "C03", "C14": "C08"}
    assert found["C03", ""]["reason"] == "AssertionError: it is this one"
    assert found["C06", ""]["reason"] == "plain declares that it lacks 'bfloat16' (it is a float32 reference)"
    assert found["C07", ""]["reason"].startswith("[XPASS(strict)] plain does not declare 'bfloat16'")
    order = [each["id"] for each in report["checks"]]
    assert order[0] == "C01"  # its level is the lowest
    assert order.index("C02") < order.index("C03") < order.index("C04") < order.index("C05")
    assert {key[0]: each["level"] for key, each in found.items()} | {"C11": 2, "C12": 2} == {
        **dict.fromkeys([f"C{number:02}" for number in (2, 3, 4, 5, 6, 7, 8, 9, 13, 14, 15)], 1),
        "C01": 0,
        "C11": 2,
        "C12": 2,
    }
    assert "C15 failed: what has the same cause: AssertionError: it is this one\n" in out  # it comes before C03
    assert "C03 failed: root: as C15\n" in out  # a cause is told once
    assert "C03 blocks: C04, C05" in out and "1 passed, and" not in out
    assert "test_above" not in out


@pytest.mark.usefixtures("forked_python")
def test_an_expected_failure_that_passes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "expected.toml").write_text("C13 = 'see our tracker'\n")
    select = ["-k", "of_a_kind or someone"]
    status, out, report = run(tmp_path, "--corerl-expected-failures", "expected.toml", *select)
    assert (status, report["passed_against_expectation"]) == (1, ["C13"])
    assert "C13 passed, but the expected failures name it (see our tracker); remove it there" in out
    (tmp_path / "expected.toml").write_text("C13 = 'a'\nC77 = 'b'\n")
    status, out, _ = run(tmp_path, "--corerl-expected-failures", "expected.toml", *select)
    assert status == 4
    assert "expected failures name checks that do not exist: C77; remove them from expected.toml" in out


@pytest.mark.usefixtures("forked_python")
def test_an_unwritable_report_is_refused_before_any_check(tmp_path: Path) -> None:
    status, out, _ = run(tmp_path, "--corerl-report", "no/report.json")
    assert status == 4
    assert "cannot write the report no/report.json" in out and "passed" not in out


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("named", ["by the command", "in the file"])
def test_checks_run_once_for_each_variant(tmp_path: Path, named: str) -> None:
    own = {"suite": WITH_VARIANTS, "backend": BACKEND}
    if named == "in the file":
        own = {"suite": WITH_VARIANTS + IN_THE_FILE, "backend": ""}
    status, out, report = run(tmp_path, "-v", **own)
    assert status == 1
    found = [(each["id"], each["variant"], each["ranks"], each["outcome"]) for each in report["checks"]]
    of_each_kind = ("C42", "C43", "C41", "C41")
    alone = [(id_, "", ranks, "passed") for ranks in (1, 2) for id_ in of_each_kind]
    assert found == [*alone, ("C41", "in pairs", 4, "failed"), ("C43", "in pairs", 4, "blocked")]
    assert report["checks"][-2]["reason"] == "AssertionError: small with in pairs"
    if named == "by the command":
        assert "corerl variants: 'in pairs' on 4 ranks\n" in out
        assert "C41 with 'in pairs' failed: training: AssertionError: small with in pairs\n" in out


@pytest.mark.usefixtures("forked_python")
def test_own_options_and_one_rank_leave_variants_out(tmp_path: Path) -> None:
    for arguments in (["--corerl-override", "any=1"], ["--corerl-level", "1"]):
        status, out, report = run(tmp_path, *arguments, suite=WITH_VARIANTS, backend=BACKEND)
        assert (status, {each["variant"] for each in report["checks"]}) == (0, {""})
        assert "in pairs" not in out
