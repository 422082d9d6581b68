"""The suite of algorithms: all that are installed pass it, and each fault is seen by the check that is there for it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from corerl.messages import one_line
from corerl.plugin import Kind, installed_names
from corerl_testing import algorithm_suite
from corerl_testing.algorithm_suite import CHECKS
from corerl_testing.marks import Check, check_of
from corerl_testing.trial import Trial
from plugins.testing.tests.broken_algorithms import FAULTY

INSTALLED = installed_names(Kind.ALGORITHMS)
# What changes the way from rewards to gradients, for those that have a critic, or none.
MASKS = ["algorithm.old_logprobs=recompute", "algorithm.correction_beyond=mask"]
SETTINGS = {
    "grpo": [
        *("algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.01", "algorithm.overlong=penalty"),
        *(*MASKS, "algorithm.correction=token", "algorithm.correction_floor=0.9", "algorithm.correction_cap=1.1"),
    ],
    "ppo": [
        *("algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithms.ppo.dual_clip=3", "algorithm.overlong=mask"),
        *(*MASKS, "algorithm.correction=geometric", "algorithm.correction_floor=0.95", "algorithm.correction_cap=1.05"),
    ],
}


def checks() -> dict[str, Check]:
    return {name: check for name, function in CHECKS.items() if (check := check_of(function)) is not None}


def failures(trial: Trial) -> dict[str, str]:
    """Id of each check that fails -> what it says. Those that build on one that failed are left out, as in a run, and
    so is the one that starts a process."""
    failed: dict[str, str] = {}
    stopped: set[str] = set()
    for name, check in sorted(checks().items(), key=lambda each: each[1].id):
        if check.id == "A01" or stopped.intersection(check.builds_on):
            stopped |= {check.id} - {"A01"}
            continue
        try:
            CHECKS[name](trial)
        except pytest.skip.Exception:
            continue
        except Exception as error:
            failed[check.id] = one_line(error)
            stopped.add(check.id)
    return failed


@pytest.mark.parametrize("name", [*INSTALLED, "examples.topr:SPEC"])
def test_an_installed_algorithm_passes_with_its_defaults(name: str) -> None:
    assert failures(Trial(name)) == {}


@pytest.mark.parametrize(("name", "overrides"), SETTINGS.items(), ids=SETTINGS)
def test_an_algorithm_passes_with_other_settings(name: str, overrides: list[str]) -> None:
    trial = Trial(name, overrides)
    assert failures(trial) == {}
    columns = trial.batch.columns
    assert "ref_logprobs" in columns and ("values" in columns) == (name == "ppo")
    assert 0.2 < (columns["advantages"][columns["loss_mask"]] == 0).mean() < 0.8  # masked


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_seen_by_its_check_alone(name: str) -> None:
    spec, found = FAULTY[name], failures(Trial(name))
    assert found.keys() == ({spec.seen_by} if spec.seen_by else set()), found
    assert all(spec.saying in told for told in found.values()), found


def test_every_check_of_algorithms_has_a_fault_that_it_sees() -> None:
    ids = {check.id for check in checks().values()}
    assert ids == {f"A{number:02}" for number in range(1, len(ids) + 1)}
    # Of these the faults are those of backends in C01 and C05, which call the same functions.
    assert ids - {spec.seen_by for spec in FAULTY.values()} == {"A01", "A04"}


def test_a_penalty_adds_its_gradient_to_the_policys() -> None:
    name = "plugins.testing.tests.broken_algorithms:TRUNCATED_WEIGHTS"
    assert failures(Trial(name, ["algorithm.kl_coef=0.5", "algorithm.kl_estimator=k1"])) == {}


def test_checks_of_algorithms_build_on_earlier_ones() -> None:
    for name, check in checks().items():
        assert all(id_ < check.id for id_ in check.builds_on) and check.level < 2, name
        assert inspect.signature(CHECKS[name]).parameters.keys() <= {"trial", "algorithm_name"}, name
        assert check.of is Kind.ALGORITHMS, name


def test_every_module_of_algorithm_checks_is_in_the_suite() -> None:
    files = Path(algorithm_suite.__path__[0]).glob("test_*.py")
    assert {path.stem for path in files} == {module.__name__.rpartition(".")[2] for module in algorithm_suite.MODULES}
