"""Routing replay in every layout: against transformers whose routers are told the same, and against no replay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from transformers import AutoConfig, AutoModelForCausalLM

from corerl.errors import ModelError
from corerl.types import Array
from corerl_testing import (
    DEEP,
    EXPERTS,
    PACKINGS,
    Runs,
    Setup,
    assert_replays,
    forward,
    grad_norm_of,
    loss_of,
    make_samples,
    running,
    through_experts,
    tiny_fields,
    token_mean,
)
from corerl_testing.scenarios import training
from plugins.megatron.tests.test_families import CP2, EP2, PP2, SP2

SPLIT_EXPERTS = {"expert_parallel": 2, "expert_tensor_parallel": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "pp2": (2, PP2),
    "pp2 vpp2": (2, {**PP2, "virtual_pipeline": 2}),
    "ep2": (2, EP2),
    "cp2": (2, CP2),
    "tp2 sp ep2 etp1": (2, {**SP2, **SPLIT_EXPERTS}),
}
CASES = [(layout, recompute) for layout in LAYOUTS for recompute in ("none", "full")]


def setup_of(runs: Runs, options: Mapping[str, Any], recompute: str = "none") -> Setup:
    kind = f"qwen3-moe{DEEP}" if "virtual_pipeline" in options else "qwen3-moe"
    setup = runs.setup("megatron", kind, PACKINGS["packed"])
    return evolve(setup, options=options, train=evolve(setup.train, recompute=recompute))


def assert_replays_as_transformers(runs: Runs, ranks: int, setup: Setup) -> None:
    assert_replays(
        Path(setup.model), lambda samples: runs.rank_sets[ranks].run(training.replay_experts, setup, samples, 0.02)
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "recompute"), CASES)
def test_it_trains_through_the_experts_that_it_is_told(runs: Runs, layout: str, recompute: str) -> None:
    ranks, options = LAYOUTS[layout]
    assert_replays_as_transformers(runs, ranks, setup_of(runs, options, recompute))


@pytest.mark.parametrize("layout", ["pp2", "tp2 sp ep2 etp1"])
def test_so_it_does_with_routers_that_choose_by_a_bias(runs: Runs, layout: str) -> None:
    ranks, options = LAYOUTS[layout]
    assert_replays_as_transformers(runs, ranks, evolve(setup_of(runs, options), model=str(runs.models["glm4-moe"])))


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dense", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 1]}], ids=["every other", "two"])
def test_layers_and_stages_without_experts_are_passed_over(
    runs: Runs, tmp_path: Path, dense: Mapping[str, Any], ranks: int
) -> None:
    fields = {**tiny_fields("qwen3-moe-deep"), **dense}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    options = PP2 if ranks == 2 else {}
    assert_replays_as_transformers(runs, ranks, evolve(setup_of(runs, options), model=str(tmp_path)))


@pytest.mark.parametrize(("layout", "recompute"), [("1", "full"), ("pp2", "none"), ("ep2", "none")])
def test_what_routers_choose_is_replayed_to_the_last_bit(runs: Runs, layout: str, recompute: str) -> None:
    ranks, options = LAYOUTS[layout]
    setup, samples = setup_of(runs, options, recompute), make_samples(7, samples=13)
    own = through_experts(runs.models["qwen3-moe"], samples, token_mean(samples)).experts
    replayed = samples.with_columns(**{EXPERTS: own.astype(np.int16)})
    found, wanted = (runs.rank_sets[ranks].run(training.train_on, setup, each) for each in (replayed, samples))
    assert loss_of(found) == loss_of(wanted)
    assert grad_norm_of(found) == grad_norm_of(wanted)


def refusals_of(setup: Setup, columns: list[Array]) -> list[str]:
    """What forward says of each; a rank that refuses one goes on."""
    said, samples = [], make_samples(7)
    with running(setup) as worker:
        for column in columns:
            with pytest.raises(ModelError) as caught:
                forward(worker, setup, samples.with_columns(**{EXPERTS: column}))
            said.append(caught.value.message)
    return said


def test_columns_of_another_model_are_refused_in_one_line(runs: Runs) -> None:
    tokens = len(make_samples(7).tokens)
    columns = [
        np.broadcast_to(np.array([1, expert], np.int16), (tokens, layers, 2))
        for layers, expert in ((3, 0), (2, 8), (2, 1))
    ]
    (said,) = runs.rank_sets[1].run(refusals_of, setup_of(runs, {}), columns)
    failed = "column 'routed_experts'"
    cure = "replay what was recorded with the same model"
    unlike = "must have 2 different experts per token, numbered 0 to 7, or -1 where there is nothing to replay"
    assert said == [
        f"{failed} has shape [3, 2] per token, but the model has 2 layers with 2 experts per token; {cure}",
        f"{failed} {unlike}; {cure}",
        f"{failed} {unlike}; {cure}",
    ]
