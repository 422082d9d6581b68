"""A role that is never trained."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
from attrs import evolve

from corerl.config.schema import Precision
from corerl.plugin.capabilities import Capability
from corerl.types import FloatArray, ForwardResult, Output
from corerl_testing.compare import in_order
from corerl_testing.harness import make_samples
from corerl_testing.marks import check
from corerl_testing.scenarios import freezing
from corerl_testing.subject import Subject
from corerl_testing.tolerances import BFLOAT16_LOGPROBS, LOGPROBS

# Of the parameters' bytes, with which caches and buffers of small models have room, and moments or masters have not.
MOST_HELD = 1.5


@check("C66", level=1, needs=[Capability.FROZEN, Capability.SLEEP], builds_on=["C43", "C45", "C51"])
def test_a_frozen_role_passes_samples_as_a_trained_one_and_holds_nothing_but_weights(subject: Subject) -> None:
    difference = frozen_against_trained(subject, "float32")
    assert difference.max() <= LOGPROBS.absolute


@check(
    "C66", level=1, needs=[Capability.FROZEN, Capability.SLEEP, Capability.BFLOAT16], builds_on=["C43", "C45", "C51"]
)
def test_its_weights_are_in_the_precision_of_its_passes(subject: Subject) -> None:
    difference = frozen_against_trained(subject, "bfloat16")
    assert difference.mean() <= BFLOAT16_LOGPROBS


def frozen_against_trained(subject: Subject, precision: Precision) -> FloatArray:
    """[N] how far its log-probs are from those of a trained role."""
    setup, directory = subject.setup("qwen3"), subject.directory / "teacher"
    setup = evolve(setup, train=evolve(setup.train, precision=precision))
    ranks = subject.run(freezing.freeze, setup, str(directory))

    def logprobs(results: Sequence[ForwardResult]) -> FloatArray:
        return in_order(results, make_samples(7), Output.LOGPROBS)

    for rank in ranks:
        assert rank.precisions == {precision}, (
            f"its weights are in {', '.join(sorted(rank.precisions))}, expected train.precision, {precision}: where "
            "config.frozen is true, build no more precise copies"
        )
        for verb, error in rank.refused.items():
            assert error.startswith(f"WrongState: {verb} on teacher rank ") and "frozen" in error
        assert rank.slept.freed_bytes == rank.parameters > 0 and rank.asleep == 0
        assert rank.held <= MOST_HELD * rank.parameters, (
            f"it holds {rank.held} bytes, of which parameters are {rank.parameters}; where config.frozen is true, "
            "build no optimizer, and no memory for gradients, moments or masters"
        )
        if rank.predicted is not None:
            assert rank.predicted == pytest.approx(rank.parameters, rel=0.1), (
                f"its parameters take {rank.parameters} bytes, but the spec's memory() predicts {rank.predicted}"
            )
    assert not os.path.exists(directory)
    found = logprobs([rank.frozen for rank in ranks])
    for later in ([rank.after_refusals for rank in ranks], [rank.after_waking for rank in ranks]):
        assert np.array_equal(logprobs(later), found)
    return np.abs(found - logprobs([rank.trained for rank in ranks]))
