"""The suite as a whole: which checks there are, and what they build on."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from corerl.errors import HookFailed
from corerl.plugin import Kind, load
from corerl_testing import algorithm_suite, suite
from corerl_testing.causes import CAUSES
from corerl_testing.marks import LEVELS, Check, check_of
from corerl_testing.subject import Runs, Subject
from corerl_testing.suite import CHECKS, test_errors, test_forward, test_memory, test_training, test_weights


def checks() -> dict[str, Check]:
    found = {name: check_of(function) for name, function in CHECKS.items()}
    return {name: check for name, check in found.items() if check is not None}


def test_every_announced_check_exists() -> None:
    ids = {check.id for check in checks().values()}
    assert ids == {f"C{number:02}" for number in range(1, max(int(id_[1:]) for id_ in ids) + 1)}
    assert all(len(name.removeprefix("test_").split("_")) >= 4 for name in checks())


def test_every_module_with_checks_is_part_of_the_suite() -> None:
    files = Path(suite.__path__[0]).glob("test_*.py")
    assert {path.stem for path in files} == {module.__name__.rpartition(".")[2] for module in suite.MODULES}


def test_checks_build_on_checks_of_no_higher_level() -> None:
    levels: dict[str, int] = {}
    builds_on: dict[str, set[str]] = {}
    for check in checks().values():
        levels[check.id] = min(check.level, levels.get(check.id, max(LEVELS)))
        builds_on.setdefault(check.id, set()).update(check.builds_on)
    assert {id_ for each in builds_on.values() for id_ in each} <= levels.keys()
    done: set[str] = set()
    while left := levels.keys() - done:
        ready = {id_ for id_ in left if builds_on[id_] <= done}
        assert ready, f"in a circle: {sorted(left)}"
        done |= ready


def test_checks_take_only_what_the_plugin_gives() -> None:
    given = {"subject", "loaded", "runs", "backend_name", "options", "tmp_path", "world_size", "slots", "wrapped"}
    for name, function in CHECKS.items():
        parameters = set(inspect.signature(function).parameters)
        own = {
            argument
            for mark in getattr(function, "pytestmark", ())
            if mark.name == "parametrize"
            for argument in (mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0])
        }
        assert parameters - own <= given, name


def test_every_check_has_two_or_three_usual_causes() -> None:
    algorithms = {check.id for function in algorithm_suite.CHECKS.values() if (check := check_of(function)) is not None}
    assert CAUSES.keys() == {check.id for check in checks().values()} | algorithms
    assert {id_: causes for id_, causes in CAUSES.items() if not 2 <= len(set(causes)) <= 3} == {}


# ---- what checks say -------------------------------------------------------------------------------------------------


def subject_of(backend: str, runs: Runs, directory: Path) -> Subject:
    return Subject(backend=backend, world_size=1, runs=runs, directory=directory)


def test_a_gradient_left_by_a_skipped_step_is_reported(runs: Runs, tmp_path: Path) -> None:
    subject = subject_of("plugins.testing.tests.faults:KEEPS_A_GRADIENT", runs, tmp_path)
    with pytest.raises(AssertionError, match="the step after a skipped one has norm nan: gradients were not cleared"):
        test_training.test_a_nonfinite_step_is_skipped_on_all_ranks(subject)
    with pytest.raises(AssertionError, match="the gradient norm of step [1-9] is .*check that gradients are cleared"):
        test_training.test_training_follows_the_plain_backend(subject, "qwen3-tied", "packed")


def test_a_leak_in_bfloat16_alone_is_seen(runs: Runs, tmp_path: Path) -> None:
    subject = subject_of("plugins.testing.tests.faults:LEAKS_IN_BFLOAT16", runs, tmp_path)
    with pytest.raises(AssertionError, match=r"^log-probs in bfloat16 .* differ by 0\.0\d+ on average, at most 0\.01"):
        test_training.test_long_sequences_in_bfloat16_do_not_see_each_other(subject)


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("corerl_testing.broken:FORGETS_TEMPERATURE", "they are right for a temperature of 1: divide logits by the ba"),
        ("plugins.testing.tests.faults:DROPS_OUT", "another worker's pass gives other ones: look at dropout"),
        ("corerl_testing.broken:OFF_BY_ONE_LOGPROBS", r"\d+ of \d+ differ$"),
    ],
)
def test_what_makes_logprobs_wrong_is_named(backend: str, said: str, runs: Runs, tmp_path: Path) -> None:
    subject = subject_of(backend, runs, tmp_path)
    with pytest.raises(AssertionError, match=rf"^logprobs of token 1 of sample 0 is .*; {said}"):
        test_forward.test_forward_gives_what_transformers_gives_in_the_samples_order(subject, "qwen3", "packed")


def test_a_snapshot_that_is_the_current_weights_is_named(runs: Runs, tmp_path: Path) -> None:
    subject = subject_of("plugins.testing.tests.faults:KEEPS_NO_SNAPSHOT", runs, tmp_path)
    with pytest.raises(AssertionError, match="^log-probs of a snapshot made of the initial weights are those of the w"):
        test_forward.test_snapshots_keep_their_weights_and_leave_the_current_ones_alone(subject, "qwen3-tied")


@pytest.mark.parametrize("backend", ["corerl_testing.broken:SENDS_ONCE", "plugins.testing.tests.faults:SENDS_LATE"])
def test_weights_of_before_the_step_are_named(backend: str, runs: Runs, tmp_path: Path) -> None:
    subject = subject_of(backend, runs, tmp_path)
    with pytest.raises(AssertionError, match="^the second update, after another step, sends the weights of before "):
        test_weights.test_an_update_delivers_every_tensor_once_and_bit_for_bit(subject, "qwen3-tied", tmp_path)


def test_a_worker_that_fails_leaves_no_group_behind(runs: Runs, tmp_path: Path) -> None:
    subject = subject_of("plugins.testing.tests.faults:FAILS_TO_SAVE", runs, tmp_path)
    loaded = load(Kind.BACKENDS, subject.backend)
    with pytest.raises(HookFailed, match="no room"):
        test_errors.test_a_worker_can_follow_another_one_in_the_same_process(subject, loaded)
    assert not torch.distributed.is_initialized()


def test_host_memory_that_was_not_reserved_is_reported(runs: Runs, tmp_path: Path) -> None:
    subject = subject_of("plugins.testing.tests.faults:FORGETS_MOMENTS_TO_COME", runs, tmp_path)
    ends = test_memory.ENDS
    with pytest.raises(AssertionError, match=r"^\d+ bytes of host memory were reserved .*; moments_to_come\(\) must"):
        test_memory.test_sleep_frees_what_it_says_and_waking_restores_every_bit(subject, ends, ends)
