"""The benchmark of the Megatron backend on a CPU: its FLOPs, its bare loop beside the plugin, and two ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import asdict, evolve
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.megatron import CASES, DIFFERENT, Case, measure_bare, measure_layout, show
from benchmarks.report import Report
from benchmarks.shapes import PEAK, flops
from corerl.testing.pool import OneRank, RankPool


def without_memory(case: Case) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**case.fields))


@pytest.mark.parametrize("name", ["tp2-dp2", "ep4"])
def test_flops_are_those_of_the_matrices_that_a_token_meets_and_of_causal_attention(name: str) -> None:
    case = CASES[name]
    fields = case.fields
    chosen = fields.get("num_experts_per_tok", 1) / fields.get("num_experts", 1)
    met = sum(
        param.numel() * (chosen if ".experts." in key else 1.0)
        for key, param in without_memory(case).named_parameters()
        if param.dim() > 1 and "embed_tokens" not in key
    )
    lengths = np.array([3000, 17])
    # Queries with keys, probabilities with values: each a multiply-add of half the pairs; once forward, twice back.
    heads = fields["num_hidden_layers"] * fields["num_attention_heads"] * fields["head_dim"]
    attention = 3 * 2 * 2 * heads * (3000**2 + 17**2) / 2
    assert flops(fields, lengths) == pytest.approx(6 * met * 3017 + attention, rel=1e-9)


def test_mfu_is_what_an_earlier_measurement_of_the_same_slice_says() -> None:
    case = CASES["bf16"]
    work = flops(case.fields, case.samples(1))
    assert 39.0e3 * work / 16384 / PEAK == pytest.approx(0.529, abs=1e-3)  # 16k tokens at 39.0k a second: 52.9 %


def bare_report() -> Report:
    return measure_bare(CASES["bf16"].tiny, name="bf16", rounds=1)


def test_plugin_and_bare_loop_take_the_same_steps_and_the_table_has_both(tmp_path: Path) -> None:
    (report,) = OneRank().run(bare_report)
    assert DIFFERENT not in report.note  # the norms of their gradients
    off, on = report.comparisons
    assert (off.target, on.target) == (1.031, None)  # 0.97 of the bare loop's speed
    rates = [number.values for number in report.numbers if "tokens a second" in number.what]
    steps = [off.ours, off.other, on.ours, on.other]
    assert rates == [pytest.approx([256 / seconds / 1e3 for seconds in each]) for each in steps]
    (tmp_path / "bf16.json").write_text(json.dumps({"report": asdict(report)}))
    text = show([tmp_path / "bf16.json"])
    assert all(number.what in text for number in report.numbers)


def test_a_layout_sends_every_weight_once_and_trains_on_after_sleep(rank_pool: RankPool, tmp_path: Path) -> None:
    case = evolve(CASES["tp2-dp2"].tiny, ranks=2)
    found = rank_pool.run(measure_layout, case, "tp2", 1, False, True)[0]
    assert found.tokens == 4 * 4 * 32
    assert found.update_bytes == 4 * sum(param.numel() for param in without_memory(case).parameters())
    assert all(math.isfinite(norm) for norm in found.norms)
    assert len(found.peaks) == len(found.outside) == 2
    (tmp_path / "tp2.json").write_text(json.dumps({"laid": asdict(found)}))
    assert "| tp2: 8B shape" in show([tmp_path / "tp2.json"])
