"""examples/topr.py: numbers worked out by hand. Its suite runs in plugins/testing/tests/test_algorithm_suite.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from corerl.algorithms.losses import LossInputs
from corerl.types import SampleBatch
from examples.topr import TOPR, Options, tapered


def test_a_sample_is_compared_with_the_mean_of_its_prompt() -> None:
    mask = np.array([False, True, True, False, True])
    samples = SampleBatch(
        tokens=np.arange(5),
        offsets=np.array([0, 3, 5]),
        columns={"loss_mask": mask},
        row_columns={"group": np.array([4, 4])},
    )
    found = TOPR(Options()).advantages(samples, np.array([3.0, 1.0], np.float32), np.zeros(5, np.float32))
    assert found.advantages.tolist() == [0.0, 1.0, 1.0, 0.0, -1.0]


def test_only_bad_samples_are_tapered_by_their_likelihood() -> None:
    # Ratios 2, 2 and 1/2: a good token, a bad one that has become likelier, a bad one that has become less likely.
    logprobs = torch.tensor([math.log(0.5), math.log(0.5), math.log(0.25)], requires_grad=True)
    old = torch.tensor([math.log(0.25), math.log(0.25), math.log(0.5)])
    columns = {
        "weights": torch.full((3,), 0.5),
        "advantages": torch.tensor([1.0, -1.0, -2.0]),
        "old_logprobs": old,
        "rollout_logprobs": old,
    }
    result = tapered(LossInputs(logprobs=logprobs, columns=columns), taper=1.5)
    result.loss.backward()
    wanted = 0.5 * (math.log(2) - 1.5 * math.log(2) - 0.5 * 2.0 * math.log(4))
    assert result.loss.item() == pytest.approx(wanted)
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-0.5, 0.75, 0.5])
    metric = result.metrics["tapered_fraction"]
    assert (metric.total.item(), metric.weight.item()) == (1.0, 3.0)
