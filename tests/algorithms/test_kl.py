"""The reference is the formula of each estimator, token by token; `test_enumeration` has their gradients."""

import math

import numpy as np
import pytest

from corerl.algorithms.kl import estimator_of, token_kl
from corerl.errors import ConfigError


def test_an_unknown_estimator_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown estimator 'k4'; use one of k1, k2, k3"):
        estimator_of("k4")


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_divergences_on_the_driver_are_the_formulas_of_the_paper(name: str) -> None:
    rng = np.random.default_rng(0)
    policy, reference = -rng.exponential(size=(2, 200)).astype(np.float32)
    mask = rng.random(200) < 0.5
    for array in (policy, reference):
        array[~mask] = np.nan
        array.flags.writeable = False  # as they come out of shared memory
    expected = []
    for p, q, is_loss_token in zip(policy.tolist(), reference.tolist(), mask.tolist(), strict=True):
        r = math.exp(q - p) if is_loss_token else 1.0
        expected.append({"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}[name])
    found = token_kl(policy, reference, mask, estimator=name)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
