"""What comparisons say that fail."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from corerl.types import Output, TrainResult
from corerl_testing.causes import Mismatch
from corerl_testing.compare import (
    BEFORE_A_STEP,
    Trajectory,
    assert_follows,
    assert_near_float32,
    assert_outputs,
    assert_resumes,
    different,
    grad_norm_of,
    reference,
    weights_apart,
)
from corerl_testing.harness import make_samples

ONE = {"model.norm.weight": np.ones(2, np.float32)}
SAID = {"losses": [1.0, 2.0, 3.0], "grad_norms": [0.5, 0.25, 0.125]}
RUN = Trajectory(results=[], **SAID, at_start={}, state={"master": ONE}, adam_step=3, optimizer_step=0)


def norm_of(*norms: float) -> float:
    return grad_norm_of([TrainResult(applied=True, metrics={}, grad_norm=norm, tokens=1) for norm in norms])


def test_norms_that_are_no_number_on_any_rank_are_equal() -> None:
    assert norm_of(0.5, 0.5) == 0.5
    assert math.isnan(norm_of(math.nan, math.nan))
    for norms in ((0.5, 0.25), (math.nan, 0.5), (0.5, math.nan)):
        with pytest.raises(AssertionError, match="^the ranks disagree on the norm: .*; sum gradients over all ranks"):
            norm_of(*norms)


def test_the_first_difference_is_named() -> None:
    assert_follows(RUN, RUN)
    for losses, grad_norms, said in (
        ([1.5, 2.0, 3.0], RUN.grad_norms, f"the loss of step 0 is 1.5, expected 1.0{BEFORE_A_STEP}"),
        ([1.0, 2.5, 3.0], [0.5, 0.5, 0.5], "the loss of step 1 is 2.5, expected 2.0"),
        (RUN.losses, [0.5, 0.5, 0.125], "the gradient norm of step 1 is 0.5, expected 0.25"),
    ):
        with pytest.raises(AssertionError) as caught:
            assert_follows(evolve(RUN, losses=losses, grad_norms=grad_norms), RUN)
        assert str(caught.value).partition("\n")[0] == said
        assert isinstance(caught.value, Mismatch) == said.endswith(BEFORE_A_STEP)


@pytest.mark.parametrize("rate", [0.01, 2.0])
def test_another_learning_rate_in_half_precision_shows_in_weights(rate: float) -> None:
    start = {name: np.zeros_like(values) for name, values in ONE.items()}
    wanted = evolve(RUN, at_start={"master": start})
    assert_near_float32(evolve(wanted, state={"master": {name: 1.05 * values for name, values in ONE.items()}}), wanted)
    with pytest.raises(AssertionError, match="what the steps added to the weights is"):
        assert_near_float32(
            evolve(wanted, state={"master": {name: rate * values for name, values in ONE.items()}}), wanted
        )


# ---- what outputs are off by -----------------------------------------------------------------------------------------

SAMPLES = make_samples(3, samples=4)  # two of a length, twice
RIGHT = np.random.default_rng(1).normal(-3.0, 1.0, len(SAMPLES.tokens)).astype(np.float32)
FIRST_TOKENS = np.isin(np.arange(len(RIGHT)), SAMPLES.offsets[:-1])
FIRST, SECOND = (slice(*SAMPLES.offsets[at : at + 2]) for at in (0, 1))


def moved(by: int) -> np.ndarray:
    return np.concatenate([np.roll(RIGHT[start:end], by) for start, end in pairwise(SAMPLES.offsets)])


def exchanged() -> np.ndarray:
    found = RIGHT.copy()
    found[FIRST], found[SECOND] = RIGHT[SECOND], RIGHT[FIRST]
    return found


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (moved(-1), "; each token has that of the next one; "),
        (moved(1), "; each token has that of the one before; "),
        (exchanged(), "; sample 0 has those of sample 1; "),
        (RIGHT[::-1].copy(), "; the values are all there, in another order than that of the samples; "),
        (np.where(FIRST_TOKENS, 0.5, RIGHT), "; only first tokens differ, which nothing predicts: outputs are"),
        (2 * RIGHT, f"logprobs of token 0 of sample 0 is {2 * RIGHT[0]}, expected {RIGHT[0]}; {len(RIGHT)} of"),
    ],
    ids=["shifted to the left", "shifted to the right", "exchanged samples", "backwards", "first tokens", "a factor"],
)
def test_outputs_of_another_token_or_sample_are_reported(found: np.ndarray, said: str) -> None:
    assert_outputs(RIGHT.copy(), RIGHT, SAMPLES, Output.LOGPROBS)
    with pytest.raises(AssertionError) as caught:
        assert_outputs(found, RIGHT, SAMPLES, Output.LOGPROBS)
    assert said in str(caught.value)


# ---- what a difference points to, beside what the broken backends show ----------------------------------------------

RNG = np.random.default_rng(0)
SHAPES = {"embed": (7, 4), "up": (4, 4), "down": (4, 4), "norm": (4,)}
START, GRADIENTS = (
    {name: RNG.normal(0, 1, shape).astype(np.float32) for name, shape in SHAPES.items()} for _ in range(2)
)


def trained(gradients: dict[str, np.ndarray] = GRADIENTS, *, losses: tuple[float, ...] = (1.0, 2.0)) -> Trajectory:
    """A run whose first step goes along the signs of its gradients."""
    masters = {name: START[name] - 1e-3 * np.sign(values) for name, values in gradients.items()}
    norm = float(np.sqrt(sum((values**2).sum() for values in gradients.values())))
    return evolve(
        RUN,
        losses=list(losses),
        grad_norms=[norm, 2 * norm],
        at_start={"master": START},
        first={"master": masters, "exp_avg": {name: np.float32(0.1) * values for name, values in gradients.items()}},
    )


def decayed(*names: str) -> Trajectory:
    found = trained(losses=(1.0, 2.5))
    masters = {name: 0.99 * value if name in names else value for name, value in found.first["master"].items()}
    return evolve(found, first={**found.first, "master": masters})


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            trained({**GRADIENTS, "up": GRADIENTS["down"], "down": 1.01 * GRADIENTS["up"]}),
            "in the first step up has the gradient of down: names are swapped",
        ),
        (
            evolve(
                trained({name: (at + 2) * values for at, (name, values) in enumerate(GRADIENTS.items())}),
                grad_norms=trained().grad_norms,
                losses=[1.0, 2.5],
            ),
            "the gradients of the first step, once clipped, are 2 to 5 times, each by a factor of its own, what they",
        ),
        (trained(losses=(1.0, 2.5)), "gradients and weights of the first step agree: check that gradients are"),
        (decayed("norm"), "such as norm: look at weight decay, which only matrices have, for no matrix is among"),
        (decayed("embed", "up", "down"), "such as embed: look at weight decay, which only matrices have, for no"),
        (decayed(*SHAPES), "such as embed: look at weight decay, the learning rate and bias correction"),
    ],
    ids=["swapped names", "clipped by tensor", "not cleared", "decayed norms", "matrices not decayed", "all"],
)
def test_a_difference_points_to_its_cause(found: Trajectory, said: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_follows(found, trained())
    assert said in str(caught.value).partition("\n")[0]


def test_moments_that_were_not_restored_are_named() -> None:
    zero = {"model.norm.weight": np.zeros(2, np.float32)}
    start = {"master": ONE, "exp_avg": ONE, "exp_avg_sq": zero}
    resumed = evolve(RUN, losses=[2.0, 3.5], grad_norms=RUN.grad_norms[1:], at_start=start, optimizer_step=1)
    with pytest.raises(AssertionError, match=r"^the loss of step 2 is 3\.5 .*; right .* gives exp_avg_sq as z"):
        assert_resumes(resumed, RUN, saved=1)


def test_tensors_that_only_one_side_has_are_named() -> None:
    none: dict[str, np.ndarray] = {}
    with pytest.raises(AssertionError, match=r"^exp_avg has no box, or only replicas, of model\.norm\.weight"):
        different({"exp_avg": none}, {"exp_avg": ONE}, ["exp_avg"])
    with pytest.raises(AssertionError, match=r"^exp_avg has unexpected boxes of model\.norm\.weight"):
        different({"exp_avg": ONE}, {"exp_avg": none}, ["exp_avg"])
    with pytest.raises(AssertionError, match=r"^weights has no box, or only replicas, of model\.norm\.weight"):
        weights_apart(none, ONE)
    assert different({"exp_avg": ONE}, {"exp_avg": ONE}, ["exp_avg"]) == []


def test_a_reference_is_computed_once_for_equal_arguments() -> None:
    asked = []

    @reference
    def total(directory: Path, values: np.ndarray, *, scale: float = 1.0) -> float:
        asked.append((directory.name, scale))
        return scale * float(values.sum())

    for _ in range(2):
        assert total(Path("a"), np.arange(4)) == 6.0
        assert total(Path("b"), np.arange(4)) == 6.0
        assert total(Path("a"), np.arange(5)) == 10.0
        assert total(Path("a"), np.arange(4), scale=2.0) == 12.0
    assert asked == [("a", 1.0), ("b", 1.0), ("a", 1.0), ("a", 2.0)]
