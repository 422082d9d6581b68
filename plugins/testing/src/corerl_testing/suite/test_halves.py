"""Steps whose gradients come in several calls: as one call would take them, whatever comes between."""

from __future__ import annotations

import math

import pytest

from corerl.plugin import Capability
from corerl.types import Output
from corerl_testing.compare import (
    Trajectory,
    assert_follows,
    assert_outputs,
    assert_same_metrics,
    grad_norm_of,
    in_order,
    loss_of,
    require_same_state,
    together,
    whole,
)
from corerl_testing.harness import make_samples
from corerl_testing.marks import check
from corerl_testing.require import require, require_equal, require_near
from corerl_testing.scenarios import halves
from corerl_testing.subject import PACKINGS, Subject
from corerl_testing.suite.test_errors import require_error
from corerl_testing.tolerances import LOSS

STEPS = 3


def taken(subject: Subject, kind: str = "qwen3", **how: object) -> Trajectory:
    arguments = {"announced": False, "unit": 0.0, "visit": "", **how}
    return together(subject.run(halves.train_in_calls, subject.setup(kind), STEPS, *arguments.values()))


@check("C67", level=1, builds_on=["C41"], variants={"kind": "qwen3-tied", "announced": False})
@pytest.mark.parametrize("announced", [False, True], ids=["open", "announced"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_the_gradients_of_several_calls_are_those_of_one(subject: Subject, kind: str, announced: bool) -> None:
    found = taken(subject, kind, announced=announced)
    wanted = subject.undisturbed(subject.setup(kind), STEPS)
    assert_follows(found, wanted)
    assert_same_metrics(found, wanted, in_calls=True)
    require_equal(f"Backend.adam_step after {STEPS} steps of several calls", found.adam_step, STEPS)


@check("C67", level=1, builds_on=["C41", "C50"], variants={})
def test_a_step_with_a_nonfinite_call_is_skipped(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    ranks = subject.run(halves.skip_a_step_in_calls, setup)
    for rank in ranks:
        require_equal("StepResult.applied of a step with NaN in its first call", rank.result.applied, False)
        counted = (rank.steps_before, rank.steps_after)
        require_equal("the list of Backend.adam_step before and after the skipped step", counted, (2, 2))
    states = (whole([getattr(rank, when) for rank in ranks]) for when in ("after", "before"))
    require_same_state("the state after the skipped step and before it", *states)
    norm = grad_norm_of([rank.then for rank in ranks])
    require(
        math.isfinite(norm),
        f"the gradient norm of the step after a skipped one is {norm}: gradients of the skipped step were not cleared",
    )
    found = loss_of([rank.then for rank in ranks])
    require_near("the loss of the step after a skipped one", found, subject.losses(setup, STEPS)[2], LOSS)


@check("C68", level=1, builds_on=["C67"], variants={})
def test_a_steps_scale_multiplies_its_gradients_before_they_are_clipped(subject: Subject) -> None:
    wanted = subject.undisturbed(subject.setup("qwen3"), STEPS)
    found = taken(subject, unit=1.0)  # the scale is 1 over the number of loss tokens
    assert_follows(found, wanted)
    assert_same_metrics(found, wanted, in_calls=True)  # the loss too, which is a sum with the token weights


@check("C69", level=1, needs=[Capability.SNAPSHOTS], builds_on=["C67", "C48"], variants={})
def test_passes_and_weight_updates_between_the_calls_leave_gradients_alone(subject: Subject) -> None:
    assert_follows(taken(subject, visit="pass"), subject.undisturbed(subject.setup("qwen3"), STEPS))


@check("C69", level=1, needs=[Capability.SLEEP], builds_on=["C67", "C43"], variants={})
def test_all_but_gradients_may_sleep_between_the_calls(subject: Subject) -> None:
    assert_follows(taken(subject, visit="sleep"), subject.undisturbed(subject.setup("qwen3"), STEPS))


@check("C69", level=1, needs=[Capability.SLEEP], builds_on=["C67"])
def test_verbs_that_would_lose_gradients_are_refused(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    ranks = subject.run(halves.refused_between, setup, str(subject.directory / "refused"))
    for refused, _ in ranks:
        for verb, error in refused.items():
            when = "before any gradient" if verb == "optimizer_step" else "while gradients wait for optimizer_step"
            require_error(f"{verb} {when}", error, "WrongState: ")
    found = loss_of([result for _, result in ranks])
    require_near("the loss of a step with refused calls in between", found, subject.losses(setup, 1)[0], LOSS)


@check("C70", level=1, builds_on=["C67", "C51"])
def test_outputs_of_training_passes_are_those_of_forward(subject: Subject) -> None:
    samples, wanted = make_samples(3, samples=6), (Output.LOGPROBS, Output.ENTROPY)
    setup = subject.setup("qwen3", PACKINGS["padded"])
    ranks = subject.run(halves.outputs_of_training, setup, samples, wanted)
    for output in wanted:
        trained = in_order([rank.trained for rank in ranks if rank.trained is not None], samples, output)
        passed = in_order([rank.passed for rank in ranks], samples, output)
        assert_outputs(trained, passed, samples, output)


@check("C24", level=1, builds_on=["C14"])
def test_an_error_in_a_steps_second_call_leaves_only_shutdown(subject: Subject) -> None:
    for errors in subject.run(halves.fail_in_the_second_call, subject.setup("qwen3", PACKINGS["one by one"])):
        second = "forward_backward failed: Fault: no such batch"
        require_error("the step's second call, which raises Fault('no such batch'),", errors["second"], "", second)
        for verb in ("optimizer_step", "forward"):
            require_error(f"{verb} after that", errors[verb], "WrongState: ", "only shutdown is allowed")
