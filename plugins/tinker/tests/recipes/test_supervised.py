"""sl_basic: the model learns to answer from examples."""

from __future__ import annotations

from plugins.tinker.tests.recipes.conftest import Serving, begin
from plugins.tinker.tests.recipes.workplace import MODEL

SL_BASIC = ("sl_basic", f"model_name={MODEL}", "learning_rate=3e-3")


def test_sl_basic_learns_from_examples(serving: Serving) -> None:
    nll = [step["train_mean_nll"] for step in begin(serving, "supervised", *SL_BASIC).finish()]
    assert nll[0] > 3.0 > 1.5 > nll[-1]
