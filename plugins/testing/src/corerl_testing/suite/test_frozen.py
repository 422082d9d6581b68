"""A role that is never trained."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from attrs import evolve

from corerl.config.schema import Precision
from corerl.plugin import Capability
from corerl.types import FloatArray, ForwardResult, Output
from corerl_testing.compare import in_order
from corerl_testing.harness import make_samples
from corerl_testing.marks import check
from corerl_testing.require import require, require_equal, require_near
from corerl_testing.scenarios import freezing
from corerl_testing.subject import Subject
from corerl_testing.tolerances import BFLOAT16_LOGPROBS, LOGPROBS, Tolerance

# Of the parameters' bytes, with which caches and buffers of small models have room, and moments or masters have not.
MOST_HELD = 1.5


@check("C66", level=1, needs=[Capability.FROZEN, Capability.SLEEP], builds_on=["C43", "C45", "C51"])
def test_a_frozen_role_gives_the_same_logprobs_with_weights_alone(subject: Subject) -> None:
    difference = frozen_against_trained(subject, "float32")
    text = f"log-probs of the frozen role are up to {difference.max():.3g} from those of a trained one with its weights"
    require(difference.max() <= LOGPROBS.absolute, f"{text}, at most {LOGPROBS.absolute:g} is allowed")


@check(
    "C66", level=1, needs=[Capability.FROZEN, Capability.SLEEP, Capability.BFLOAT16], builds_on=["C43", "C45", "C51"]
)
def test_its_weights_are_in_the_precision_of_its_passes(subject: Subject) -> None:
    difference = frozen_against_trained(subject, "bfloat16")
    text = f"log-probs of the frozen role are on average {difference.mean():.3g} from those of a trained one"
    require(difference.mean() <= BFLOAT16_LOGPROBS, f"{text}, at most {BFLOAT16_LOGPROBS:g} is allowed")


def frozen_against_trained(subject: Subject, precision: Precision) -> FloatArray:
    """[N] how far its log-probs are from those of a trained role."""
    setup, directory = subject.setup("qwen3"), subject.directory / "teacher"
    setup = evolve(setup, train=evolve(setup.train, precision=precision))
    ranks = subject.run(freezing.freeze, setup, str(directory))

    def logprobs(results: Sequence[ForwardResult]) -> FloatArray:
        return in_order(results, make_samples(7), Output.LOGPROBS)

    for rank in ranks:
        require(
            rank.precisions == {precision},
            f"its weights are in {', '.join(sorted(rank.precisions))}, expected train.precision, {precision}: where "
            "config.frozen is true, build no more precise copies",
        )
        for verb, error in rank.refused.items():
            require(
                error.startswith(f"WrongState: {verb} on teacher rank ") and "frozen" in error,
                f"{verb} of a frozen role gave {error or 'no error'!r}, expected WrongState: {verb} on teacher rank",
            )
        require(
            rank.slept.freed_bytes == rank.parameters > 0 and rank.asleep == 0,
            f"sleep freed {rank.slept.freed_bytes} bytes and left {rank.asleep}, but its parameters take "
            f"{rank.parameters}; a frozen role holds weights alone",
        )
        require(
            rank.held <= MOST_HELD * rank.parameters,
            f"it holds {rank.held} bytes, of which parameters are {rank.parameters}; where config.frozen is true, "
            "build no optimizer, and no memory for gradients, moments or masters",
        )
        if rank.predicted is not None:
            what = "bytes of parameters that the spec's memory() predicts for a frozen role, against those it holds:"
            require_near(what, rank.predicted, rank.parameters, Tolerance(0.1))
    require_equal(f"whether a frozen role has written {directory}", os.path.exists(directory), False)
    found = logprobs([rank.frozen for rank in ranks])
    for when in ("after_refusals", "after_waking"):
        apart = float(np.abs(logprobs([getattr(rank, when) for rank in ranks]) - found).max())
        require_equal(f"the largest change of its log-probs {when.replace('_', ' ')}", apart, 0.0)
    return np.abs(found - logprobs([rank.trained for rank in ranks]))
