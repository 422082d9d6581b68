"""preference.dpo: what was preferred becomes likelier than it is to a frozen reference."""

from __future__ import annotations

import math

import pytest

from plugins.tinker.tests.recipes.conftest import Serving, begin


def test_dpo_widens_the_margin_to_a_frozen_reference(serving: Serving) -> None:
    steps = begin(
        serving,
        "preferences",
        "preference.dpo.train renderer_name=role_colon learning_rate=1e-3 batch_size=32 max_steps=8",
    ).finish("margin")
    margins, losses = [step["margin"] for step in steps], [step["dpo_loss"] for step in steps]
    assert margins[0] == pytest.approx(0.0, abs=1e-4)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert margins[-1] > 1.0
    assert losses[-1] < 0.4
