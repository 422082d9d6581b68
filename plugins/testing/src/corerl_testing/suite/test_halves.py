"""Steps whose gradients come in several calls: as one call would take them, whatever comes between."""

from __future__ import annotations

import math

import numpy as np
import pytest

from corerl.plugin.capabilities import Capability
from corerl.types import Output
from corerl_testing.compare import (
    Trajectory,
    assert_follows,
    assert_same_metrics,
    different,
    grad_norm_of,
    in_order,
    loss_of,
    together,
    whole,
)
from corerl_testing.harness import make_samples
from corerl_testing.marks import check
from corerl_testing.scenarios import halves
from corerl_testing.subject import PACKINGS, Subject
from corerl_testing.tolerances import LOGPROBS, LOSS

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
    assert found.adam_step == STEPS


@check("C67", level=1, builds_on=["C41", "C50"], variants={})
def test_a_step_of_which_one_call_is_not_finite_is_skipped_and_leaves_nothing_to_the_next(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    ranks = subject.run(halves.skip_a_step_in_calls, setup)
    assert [rank.result.applied for rank in ranks] == [False] * subject.world_size
    assert [(rank.steps_before, rank.steps_after) for rank in ranks] == [(2, 2)] * subject.world_size
    assert different(whole([rank.after for rank in ranks]), whole([rank.before for rank in ranks])) == []
    assert math.isfinite(grad_norm_of([rank.then for rank in ranks])), "gradients of the skipped step were kept"
    found = loss_of([rank.then for rank in ranks])
    assert found == pytest.approx(subject.losses(setup, STEPS)[2], rel=LOSS.relative, abs=LOSS.absolute)


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
def test_what_would_lose_gradients_or_come_without_them_is_refused_and_the_step_is_taken(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    ranks = subject.run(halves.refused_between, setup, str(subject.directory / "refused"))
    for refused, _ in ranks:
        assert {verb: error.partition(": ")[0] for verb, error in refused.items()} == dict.fromkeys(
            ("optimizer_step", "save", "sleep", "forward_backward"), "WrongState"
        )
    found = loss_of([result for _, result in ranks])
    assert found == pytest.approx(subject.losses(setup, 1)[0], rel=LOSS.relative, abs=LOSS.absolute)


@check("C70", level=1, builds_on=["C67", "C51"])
def test_outputs_of_training_passes_are_those_of_forward(subject: Subject) -> None:
    samples, wanted = make_samples(3, samples=6), (Output.LOGPROBS, Output.ENTROPY)
    setup = subject.setup("qwen3", PACKINGS["padded"])
    ranks = subject.run(halves.outputs_of_training, setup, samples, wanted)
    for output in wanted:
        trained = in_order([rank.trained for rank in ranks if rank.trained is not None], samples, output)
        passed = in_order([rank.passed for rank in ranks], samples, output)
        np.testing.assert_allclose(trained, passed, rtol=LOGPROBS.relative, atol=LOGPROBS.absolute)


@check("C24", level=1, builds_on=["C14"])
def test_an_error_in_a_steps_second_call_leaves_only_shutdown(subject: Subject) -> None:
    for errors in subject.run(halves.fail_in_the_second_call, subject.setup("qwen3", PACKINGS["one by one"])):
        assert "forward_backward failed: Fault: no such batch" in errors["second"]
        for verb in ("optimizer_step", "forward"):
            assert errors[verb].startswith("WrongState: ") and "only shutdown is allowed" in errors[verb]
