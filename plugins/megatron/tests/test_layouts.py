"""Layouts beyond the conformance suite: each gives transformers' log-probs, and trains as the plain backend does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.types import LossSpec, merge_metrics
from corerl_testing import (
    DEEP,
    GRAD_NORM,
    LOSS,
    RankPool,
    Runs,
    Setup,
    assert_follows,
    assert_same_metrics,
    drawn_model,
    grad_norm_of,
    loss_of,
    smallest_config,
    tiny_fields,
)
from plugins.megatron.tests import ranks
from plugins.megatron.tests.test_families import CP2, EP2, PP2, SP2, TP2, WHOLE_EXPERTS

STEPS = 2  # what is wrong with a layout is so in its first step
TWO = {"tp2 sp": SP2, "pp2 vpp2": {**PP2, "virtual_pipeline": 2}}
FOUR = {"tp2 pp2": {**TP2, **PP2}, "pp2 cp2": {**PP2, **CP2}, "tp2 sp cp2": {**SP2, **CP2}}
EXPERTS = {
    "ep2": EP2,
    "tp2 sp etp1": WHOLE_EXPERTS,
    "tp2 sp, experts cut too": SP2,
    "experts cut over ranks that read different samples": {"expert_tensor_parallel": 2},
    "tp2 sp ep2 etp1": {**WHOLE_EXPERTS, **EP2},
}
ONCE, MLP, WHOLE = (1, 1), (1, 2), (2, 2)  # how often a layer runs for a micro-batch, and its MLP
RECOMPUTED: Mapping[str, tuple[str, Mapping[str, Any], list[tuple[int, int]]]] = {
    "tp2 sp": ("qwen3-tied", SP2, [WHOLE] * 2),
    "pp2, one of two layers": (
        f"qwen3-tied{DEEP}",
        {**PP2, "recompute_method": "block", "recompute_layers": 1},
        [WHOLE, ONCE],
    ),
    "cp2, in pairs": (f"qwen3-tied{DEEP}", {**CP2, "recompute_layers": 2}, [WHOLE] * 4),
    "pp2 vpp2, MLPs": (f"qwen3-tied{DEEP}", {**PP2, "virtual_pipeline": 2, "recompute": "mlp"}, [MLP] * 2),
    "ep2, experts": ("qwen3-moe", {**EP2, "recompute": "mlp"}, [MLP] * 2),
    "ep2, a bias in each router": ("glm4-moe", EP2, [WHOLE] * 2),
}


@pytest.fixture(scope="module")
def runs_of_four(runs: Runs, four_ranks: RankPool) -> Runs:
    return runs.beside({4: four_ranks})


def kind_for(kind: str, options: Mapping[str, Any]) -> str:
    """Interleaved stages want two layers each."""
    return f"{kind}{DEEP}" if "virtual_pipeline" in options else kind


def assert_trains_as_plain(
    runs: Runs, world_size: int, kind: str, options: Mapping[str, Any], *, value_head: bool = False
) -> None:
    kind = kind_for(kind, options)
    setup = evolve(runs.setup("megatron", kind), options=options, value_head=value_head)
    found = runs.train(world_size, setup, range(STEPS))
    wanted = runs.trained_as(1, evolve(runs.setup("plain", kind), value_head=value_head), STEPS)
    assert_follows(found, wanted)
    assert_same_metrics(found, wanted)


@pytest.mark.parametrize(("kind", "layout"), [("qwen3", "tp2 sp"), ("qwen3-tied", "pp2 vpp2")])
def test_two_ranks_train_as_the_plain_backend_does(runs: Runs, kind: str, layout: str) -> None:
    assert_trains_as_plain(runs, 2, kind, TWO[layout])


def test_padding_of_the_vocabulary_is_left_out(runs: Runs, tmp_path: Path) -> None:
    drawn_model(smallest_config("qwen3", vocab_size=130)).save_pretrained(tmp_path)
    plain = evolve(runs.setup("plain", "qwen3"), model=str(tmp_path), vocabulary=97)
    cut = evolve(plain, backend="megatron", options=TWO["tp2 sp"])  # the second rank has most of the padding
    assert_follows(runs.train(2, cut, range(STEPS)), runs.train(1, plain, range(STEPS)))


@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_on_two_ranks_train_as_the_plain_backend_does(runs: Runs, layout: str) -> None:
    assert_trains_as_plain(runs, 2, "qwen3-moe", EXPERTS[layout])


def test_experts_that_are_cut_and_spread_train_as_plain(runs_of_four: Runs) -> None:
    assert_trains_as_plain(runs_of_four, 4, "qwen3-moe", {**SP2, **EP2})


@pytest.mark.parametrize("layout", FOUR)
def test_four_ranks_train_as_the_plain_backend_does(runs_of_four: Runs, layout: str) -> None:
    assert_trains_as_plain(runs_of_four, 4, "qwen3-tied", FOUR[layout])


@pytest.mark.parametrize(
    ("layout", "loss"), [("cp2", "gspo"), ("tp2 sp", "gspo"), ("pp2 vpp2", "gspo"), ("cp2", "gspo_token")]
)
def test_ranks_that_share_a_sample_have_its_whole_ratio(runs: Runs, layout: str, loss: str) -> None:
    options = {**TWO, "cp2": CP2}[layout]
    kind = kind_for("qwen3-tied", options)
    clipping = LossSpec(name=f"corerl_algorithms.gspo:{loss}", params={"clip_low": 0.02, "clip_high": 0.02})
    reports = runs.rank_sets[2].run(ranks.steps_on, evolve(runs.setup("megatron", kind), options=options), clipping, 2)
    (wanted,) = runs.rank_sets[1].run(ranks.steps_on, runs.setup("plain", kind), clipping, 2)
    assert 0.1 < wanted[0].metrics["clip_fraction"].value < 0.9
    for step, alone in zip(zip(*reports, strict=True), wanted, strict=True):
        assert grad_norm_of(step) == pytest.approx(alone.grad_norm, rel=GRAD_NORM.relative)
        found = merge_metrics(each.metrics for each in step)
        for name in ("loss", "ratio", "sequence_ratio", "clip_fraction"):
            near = pytest.approx(alone.metrics[name].value, rel=LOSS.relative, abs=LOSS.absolute)
            assert found[name].value == near, name


@pytest.mark.parametrize("distributed", [True, False])
def test_a_stage_without_experts_trains_beside_one_that_has_some(runs_of_four: Runs, distributed: bool) -> None:
    fields = {**tiny_fields(f"qwen3-moe{DEEP}"), "mlp_only_layers": [0, 1]}  # of four layers
    options = {"expert_parallel": 2, "pipeline_parallel": 2, "distributed_optimizer": distributed}
    setup = Setup(backend="megatron", model="", fields=fields, options=options)
    wanted = runs_of_four.trained_as(1, evolve(setup, backend="plain", options={}), 3)
    assert_follows(runs_of_four.train(4, setup, range(3)), wanted)


@pytest.mark.parametrize("layout", ["tp2 sp", "pp2 vpp2", "cp2"])
def test_a_critic_on_two_ranks_trains_as_plain(runs: Runs, layout: str) -> None:
    assert_trains_as_plain(runs, 2, "qwen3", {**TWO, "cp2": CP2}[layout], value_head=True)


@pytest.mark.parametrize("case", RECOMPUTED)
def test_layers_that_are_recomputed_train_as_others_do(runs: Runs, case: str) -> None:
    kind, options, passes = RECOMPUTED[case]
    setup = runs.setup("megatron", kind)
    setup = evolve(setup, options=options, train=evolve(setup.train, recompute="full"))
    reports = runs.rank_sets[2].run(ranks.steps_and_passes, setup, range(3))
    wanted = runs.trained_as(1, runs.setup("plain", kind))
    steps = list(zip(*(results for results, _ in reports), strict=True))
    assert [loss_of(step) for step in steps] == pytest.approx(wanted.losses[:3], rel=LOSS.relative, abs=LOSS.absolute)
    assert [grad_norm_of(step) for step in steps] == pytest.approx(wanted.grad_norms[:3], rel=GRAD_NORM.relative)
    assert [found for _, found in reports] == [passes] * 2
