"""sl_basic: the model learns to answer from examples, and as it does on any backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins.tinker.tests.recipes.conftest import Serving, begin

SL_BASIC = "sl_basic learning_rate=3e-3"
NLL = "train_mean_nll"
BACKENDS = {
    "fsdp": ["backend.name=fsdp", "roles.actor.ranks=2"],
    "deepspeed": ["backend.name=deepspeed", "roles.actor.ranks=2"],
    "megatron": ["backend.name=megatron", "roles.actor.ranks=2", "backends.megatron.tensor_parallel=2"],
}


@pytest.fixture(scope="module")
def plain(serving: Serving) -> list[float]:
    """The mean negative log-likelihood before each step, on the plain backend."""
    return [step[NLL] for step in begin(serving, "plain", SL_BASIC).finish(NLL)]


def test_sl_basic_learns_from_examples(plain: list[float]) -> None:
    assert len(plain) == 15
    assert plain[0] > 3.0 > 1.5 > plain[-1]


@pytest.mark.parametrize("name", BACKENDS)
def test_other_backends_have_the_same_curve(name: str, plain: list[float], offline: Path) -> None:
    with Serving(offline, *BACKENDS[name]) as serving:
        found = [step[NLL] for step in begin(serving, name, SL_BASIC).finish(NLL)]
    assert found == pytest.approx(plain, abs=1e-4)
