"""What comparisons say that fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
from attrs import evolve

from corerl.testing.compare import Trajectory, assert_follows, different, grad_norm_of, weights_apart
from corerl.types import TrainResult

ONE = {"model.norm.weight": np.ones(2, np.float32)}
RUN = Trajectory(
    results=[],
    losses=[1.0, 2.0, 3.0],
    grad_norms=[0.5, 0.25, 0.125],
    at_start={},
    state={"master": ONE},
    adam_step=3,
    optimizer_step=0,
)


def norm_of(*norms: float) -> float:
    return grad_norm_of([TrainResult(applied=True, metrics={}, grad_norm=norm, tokens=1) for norm in norms])


def test_norms_that_are_no_number_on_any_rank_are_equal() -> None:
    assert norm_of(0.5, 0.5) == 0.5
    assert math.isnan(norm_of(math.nan, math.nan))
    for norms in ((0.5, 0.25), (math.nan, 0.5), (0.5, math.nan)):
        with pytest.raises(AssertionError, match="^the ranks disagree on the norm"):
            norm_of(*norms)


@pytest.mark.parametrize(
    ("losses", "grad_norms", "said"),
    [
        ([1.5, 2.0, 3.0], RUN.grad_norms, "the loss of step 0 is 1.5, expected 1.0\n"),
        (
            [1.0, 2.5, 3.0],
            [0.5, 0.5, 0.5],
            "step 1 is 2.5, expected 2.0; the first step agrees, so the optimizer's step must differ",
        ),
        (
            RUN.losses,
            [0.5, 0.5, 0.125],
            "the gradient norm of step 1 is 0.5, expected 0.25; its loss and the earlier steps agree",
        ),
    ],
)
def test_what_differs_first_is_told_with_what_it_points_to(
    losses: list[float], grad_norms: list[float], said: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_follows(evolve(RUN, losses=losses, grad_norms=grad_norms), RUN)
    assert said in str(caught.value)
    assert_follows(RUN, RUN)


def test_tensors_that_only_one_side_has_are_named() -> None:
    none: dict[str, np.ndarray] = {}
    with pytest.raises(AssertionError, match=r"^exp_avg has no box, or only replicas, of model\.norm\.weight"):
        different({"exp_avg": none}, {"exp_avg": ONE}, ["exp_avg"])
    with pytest.raises(AssertionError, match=r"^exp_avg has unexpected boxes of model\.norm\.weight"):
        different({"exp_avg": ONE}, {"exp_avg": none}, ["exp_avg"])
    with pytest.raises(AssertionError, match=r"^weights has no box, or only replicas, of model\.norm\.weight"):
        weights_apart(none, ONE)
    assert different({"exp_avg": ONE}, {"exp_avg": ONE}, ["exp_avg"]) == []
