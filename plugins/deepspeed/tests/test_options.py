"""Stages, offload and the other options change no number beyond rounding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.checkpoint import begin
from corerl_testing import (
    BFLOAT16_GRAD_NORM,
    BFLOAT16_LOSS,
    Checkpoint,
    Runs,
    assert_follows,
    different,
    mean_apart,
)

STEPS = range(2)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"stage": 1, "offload": "optimizer"}, "qwen3-tied"),
        ({"stage": 3, "offload": "parameters"}, "qwen3-moe"),
        ({"stage": 3, "raw": {"zero_optimization": {"stage3_param_persistence_threshold": 10**6}}}, "qwen3-moe"),
        ({"stage": 3, "reduce_bucket": 5000, "gather_bucket": 5000}, "qwen3-moe"),
        ({"stage": 2, "reduce_bucket": 5000, "gather_bucket": 5000}, "qwen3-moe"),
    ],
    ids=str,
)
def test_with_options_a_run_follows_the_plain_backend(runs: Runs, kind: str, options: Mapping[str, Any]) -> None:
    """Besides the variants of the spec, with which the conformance suite trains a model without experts."""
    found = runs.train(2, evolve(runs.setup("deepspeed", kind), options=options), STEPS)
    assert_follows(found, runs.trained_as(1, runs.setup("plain", kind), len(STEPS)))


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1},
        {"stage": 2, "offload": "optimizer"},
        {"stage": 3, "offload": "parameters"},
    ],
    ids=str,
)
def test_bfloat16_stays_near_float32_and_resumes_to_the_last_bit(
    runs: Runs, tmp_path: Path, options: Mapping[str, Any]
) -> None:
    setup, checkpoint = (
        evolve(runs.setup("deepspeed", "qwen3-tied"), options=options),
        Checkpoint(begin(tmp_path, 3), 2),
    )
    half = evolve(setup, train=evolve(setup.train, precision="bfloat16"))
    found = runs.train(2, half, range(6), save_after=2, save_to=checkpoint.role)
    wanted = runs.trained_as(1, runs.setup("plain", "qwen3-tied"), 6)
    assert 0 < mean_apart(found.losses, wanted.losses) < BFLOAT16_LOSS
    assert 0 < mean_apart(found.grad_norms, wanted.grad_norms) < BFLOAT16_GRAD_NORM
    resumed = runs.train(2, half, range(3, 6), resume=checkpoint.complete())
    assert (resumed.losses, different(resumed.state, found.state)) == (found.losses[3:], [])
