"""A loss of the suite, passed to backends by name like a user's loss."""

from __future__ import annotations

import torch

from corerl.algorithms.losses import LossInputs, LossResult, TensorMetric
from corerl.types import LossSpec, Output, Reduction


def likelihood(inputs: LossInputs) -> LossResult:
    """loss = -sum_t weights_t * logprobs_t: plain maximum likelihood, without clipping or penalties."""
    assert inputs.logprobs is not None
    loss = -(inputs.columns["weights"] * inputs.logprobs).sum()
    return LossResult(loss, {"loss": TensorMetric(loss.detach(), torch.ones_like(loss), Reduction.LOSS)})


LIKELIHOOD = LossSpec(name=f"{__name__}:likelihood", outputs=(Output.LOGPROBS,))
