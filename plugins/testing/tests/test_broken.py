"""The conformance suite sees each fault that it is there for, and tells of that one alone."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from corerl.plugin.registry import Kind, load
from corerl_testing.broken import BROKEN
from corerl_testing.subject import Runs, Subject
from corerl_testing.suite import test_gpu
from tests.forks.client import Forked
from tests.machine import wait_for_memory

pytestmark = pytest.mark.processes

GIB = 3.0  # of memory that the suite and its ranks take
PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"

# What the failed check must say of the fault: of what is wrong, and where to look.
SAYS = {
    "imports_torch:SPEC": r"imports \['torch'\], expected none .* import in functions what is heavy",
    "UNKNOWN_ARGUMENT": r"optimizer_step\(step, factor\).* parameter 'factor' is not passed by name",
    "DROPS_RESULT": r"optimizer_step\(\) returned NoneType, expected StepResult",
    "SWALLOWS_ERRORS": r"gave 'no error', expected 'forward_backward failed.*an error is caught and counts as a batch",
    "MUTATES_BATCH": r"has written into advantages of micro-batch 0, .*copy it first",
    "LEAVES_A_TENSOR_OUT": r"local_state\('master'\) lacks model\.norm\.weight",
    "LOADS_TWICE": r"\d+ bytes were held at once while loading, but at most \d+ .*before any is copied",
    "OFF_BY_ONE_LOGPROBS": r"logprobs of token 1 of sample 0 is .*, expected .*log-probs are off by one token",
    "FORGETS_TEMPERATURE": r"logprobs of token 1 of sample 0 is .*, expected .*not divided by the temperature",
    "SAMPLES_BACKWARDS": r"logprobs of token 0 of sample 0 is -.*, expected 0\.0.*not in the samples' order",
    "LEAKS_BETWEEN_LONG_SEQUENCES": r"the first 28 tokens of each sample are right.*saw what they are packed with",
    "LEAKS_IN_TRAINING": r"of samples of 34 to 131 tokens, each alone against all packed.*leaks between packed",
    "LEAKS_IN_A_CRITIC": r"values of token 28 .*the first 28 tokens of each sample are right.*saw what they are packed",
    "LOSES_WEIGHTS_IN_SWAP": r"differ by 0\.0 from the first ones: the snapshot stays in the model's place",
    "KEEPS_SNAPSHOT": r"current weights after snapshots were used, and before, differ.*a snapshot stays in the model's",
    "WRONG_TOKEN_WEIGHTS": r"each alone against all packed, is .*divided by the micro-batch's tokens",
    "OWN_EXPERTS": r"loss of a step through the experts that were given is .*routed_experts is ignored in training",
    "IGNORES_AUX_LOSS": r"'moe/aux_loss' is None, but aux_loss_coef 0\.5.*aux_loss_coef is ignored",
    "KEEPS_FIRST_RATE": r"weights of the first step agree: .* the learning rate of later ones",
    "ALWAYS_SCALES": r"once clipped, are 29 times .*look at the clip.*also where the norm is below the limit",
    "DECAYS_NORMS": r"not the weights after it, in 9 of 24 tensors, such as .*norm\.weight: look at weight decay",
    "COUNTS_SKIPPED_STEPS": r"adam_step before and after the skipped step at 1 is 3, expected 2",
    "FORGETS_EARLIER_CALLS": r"samples or calls may be left out.*gradients are cleared at the beginning of forward",
    "STEPS_IN_EVERY_CALL": r"forward_backward moved model\.embed_tokens\.weight, .*only optimizer_step may",
    "REDUCES_TWICE": r"count more than once.*gradients of earlier calls are summed over ranks once more",
    "IGNORES_SCALE": r"before, they are 57 times what they must be.*optimizer_step ignores scale",
    "CLEARS_TOO_EARLY": r"are 0 times what they must be in 25 of 25 .*forward or update_weights clears gradients",
    "RETURNS_OUTPUTS_OF_ONE_MICRO_BATCH": r"logprobs of sample 1 came from no rank.*outputs are of the last micro",
    "RANK_DEPENDENT_METRICS": r"the metric 'ratio' of step 0, .*a rank reports a mean where \(sum, weight\)",
    "ANSWERS_ON_EVERY_RANK": r"came twice, .*of ranks that share samples one sets outputs",
    "ANNOUNCES_ONE_GROUP": r"dp_size is 2 on rank 0 of 2, but the spec's data_parallel returns 1",
    "FORGETS_OTHER_PAIRS": r"the ranks disagree on the norm: .*sum gradients over all ranks that have other samples",
    "FORGETS_OPTIMIZER": r"so the weights were restored, but not the moments",
    "PARTIAL_CHECKPOINT": r"of a save that was killed midway, .* count as a whole checkpoint; write the index last",
    "STAGES_TOO_LATE": r"in the files, and the one when the save began, differ.*read in the background thread",
    "STALE_WEIGHTS": r"weights as an engine gets them and as trained differ: .*gathered once and kept",
    "SENDS_ONCE": r"weights of the second update, after another step, and as trained differ: .*gathered once and kept",
    "ROUNDS_BUFFERS": r"buffers as sent .*must stay float32, .*differ: .*rounded to weights\.dtype",
    "SKIPS_TIED_PARAMETER": r"an engine got each weight lacks model\.embed_tokens\.weight.*a tied weight is left out",
    "LEAKS_ON_SLEEP": r"all tensors of the process take \d+ bytes .*something keeps a copy of what sleeps",
    "KEEPS_GRADIENTS": r"gradients of \d+ bytes stay while all kinds sleep; free them in optimizer_step",
    "KEEPS_MOMENTS_AWAKE": r"tensors\(kind\) of all kinds hold \d+ bytes, but weights and moments .*leaves out",
    "WAKES_DIRTY": r"after waking and before sleeping differ: exp_avg .*all of it is 0.*zeroes what it must restore",
    "TRAINS_A_FROZEN_ROLE": r"holds \d+ bytes, of which parameters are \d+; where config.frozen .*build no optimizer",
    "SCALES_ADAPTERS_TWICE": r"2 times what they must be.*alpha / rank is left out, or applied twice",
    "TRAINS_BESIDE_ADAPTERS": r"beside adapters, which are not trained, .*differ: param of model\.norm\.weight",
    "SENDS_WITHOUT_ADAPTERS": r"the weights as sent are 0 from those without adapters: none is merged",
    "PREDICTS_TOO_LITTLE": r"a rank holds \d+ bytes of optimizer after a step, but the spec's memory\(\) predicts 0",
}

# All broken backends in one process: what plain trains, which each is compared with, is trained once.
SUITE = """
import pytest

from corerl_testing import with_variants
from corerl_testing.broken import BROKEN
from corerl_testing.suite import *


@pytest.fixture(scope="session", params=BROKEN)
def backend_name(request):
    return request.param


@pytest.fixture(scope="session", params=with_variants("corerl_testing.broken:FORGETS_OTHER_PAIRS"))
def backend_variant(request):
    return request.param
"""
# One model and packing of a check is enough to see a fault. A check is left out that needs what the backend declares to
# lack (it would end as unsupported), or that runs one rank where the fault is between ranks. Unless all checks are
# asked for, a backend meets the check that must see its fault, and the first that this one builds on, which must not.
CONFTEST = """
import gc
import os

from corerl.plugin import registry
from corerl.plugin.capabilities import Capability
from corerl_testing.broken import BROKEN
from corerl_testing.marks import check_of
from corerl_testing.outcomes import repeated


def pytest_collection_modifyitems(items):
    again = set(repeated(items))
    checks = map(check_of, {item.function for item in items})
    before = {check.id: check.builds_on[0] if check.builds_on else "C02" for check in checks}
    items[:] = [item for item in items if item not in again and wanted(item, before)]


def wanted(item, before):
    parameters, check = item.callspec.params, check_of(item.function)
    name, world_size = parameters["backend_name"], parameters.get("world_size", 0)
    variant = parameters.get("backend_variant")
    spec = registry.load(registry.Kind.BACKENDS, name).spec
    lacks = {each for each, support in spec.capabilities.items() if not support.full}
    if variant not in (spec.variants or (None,)) and (world_size or variant is not None):
        return False  # with variants, it is without a fault elsewhere
    if world_size == 1 and Capability.MULTI_RANK not in lacks:
        return False
    several = [Capability.MULTI_RANK] if check.level_at(world_size) > 1 else []
    if lacks & {*check.needs, *several}:
        return False
    return "ALL_CHECKS" in os.environ or check.id in (BROKEN[name], before[BROKEN[name]])


def pytest_collection_finish():
    gc.freeze()  # looking for living tensors, a check passes over what was there before any backend
"""


def run_suite(directory: Path, **environment: str) -> dict[str, list[dict[str, Any]]]:
    """Name of a broken backend -> its checks in the report of levels 0 to 2."""
    wait_for_memory(GIB, "the suite with broken backends")
    arguments = ["pytest", "-q", "--tb=line", "-p", "corerl_testing.plugin", "-c", "/dev/null", "--rootdir", "."]
    arguments += ["-p", "no:cacheprovider", "--corerl-level", "2", "--corerl-report", "report.json", "test_suite.py"]
    (directory / "test_suite.py").write_text(SUITE)
    (directory / "conftest.py").write_text(CONFTEST)
    own = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with (directory / "out.txt").open("w") as out:
        process = Forked(arguments, PYTEST, environment=own, directory=directory, stdout=out, stderr=out)
    assert process.wait() == pytest.ExitCode.TESTS_FAILED, (directory / "out.txt").read_text()
    return {report["value"]: report["checks"] for report in json.loads((directory / "report.json").read_text())}


@pytest.fixture(scope="session")
def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run_suite(tmp_path_factory.mktemp("broken"))


@pytest.fixture(scope="session")
def all_checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run_suite(tmp_path_factory.mktemp("broken"), ALL_CHECKS="1")


@pytest.mark.timeout(1200)  # the first one waits for all
@pytest.mark.parametrize("name", BROKEN)
def test_the_named_check_sees_a_broken_backends_fault(name: str, checks: dict[str, list[dict[str, Any]]]) -> None:
    failed = [f"{check['id']}: {check['reason']}" for check in checks[name] if check["outcome"] == "failed"]
    said = "\n".join(failed)
    assert {line.partition(":")[0] for line in failed} == {BROKEN[name]}, said
    assert re.search(SAYS[re.sub(r"^corerl_testing\.broken[.:]", "", name)], said), said
    builds_on = {check["outcome"] for check in checks[name] if check["id"] != BROKEN[name]}
    assert builds_on <= {"passed", "not run"}


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
    halved = test_gpu.test_bfloat16_on_gpus_stays_near_the_plain_backend_on_a_cpu
    forward(on_a_cpu("plain"), "qwen3")
    training(on_a_cpu("plain"), "qwen3")
    with pytest.raises(AssertionError):
        halved(on_a_cpu("plain"))
    with pytest.raises(AssertionError):
        training(on_a_cpu("corerl_testing.broken:KEEPS_FIRST_RATE"), "qwen3")
    with pytest.raises(AssertionError):
        forward(on_a_cpu("corerl_testing.broken:FORGETS_TEMPERATURE"), "qwen3")
    with pytest.raises(AssertionError):
        halved(on_a_cpu("corerl_testing.broken:FORGETS_TEMPERATURE"))


def test_every_broken_backend_says_what_is_wrong() -> None:
    specs = [load(Kind.BACKENDS, name).spec for name in BROKEN]
    assert len(BROKEN) >= 14
    assert len({spec.implementation for spec in specs}) == len(specs)
    assert all(spec.summary.startswith("wrong on purpose: ") for spec in specs)
