"""What benchmarks of training steps count: FLOPs, parameters, and the weights that they begin with."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks import steps
from benchmarks.deepspeed import QWEN3_4B
from benchmarks.megatron import CASES
from benchmarks.steps import PEAK, SLICE, QuickWeights, Work, flops, run_ranks


def without_memory(work: Work) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**work.fields))


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


def test_the_shapes_have_the_parameters_that_are_told_of_them() -> None:
    found = [sum(p.numel() for p in without_memory(Work(what="", fields=x)).parameters()) for x in (SLICE, QWEN3_4B)]
    assert [round(numel / 1e9, 2) for numel in found] == [2.79, 4.02]


def test_weights_are_the_same_whole_and_in_boxes_and_numbers_of_bfloat16() -> None:
    weights = QuickWeights({"a": (6, 8), "b": (6, 8), "norm": (6,)}, torch.device("cpu"))
    whole = weights.whole("a")
    assert torch.equal(weights.read("a", (2, 3), (3, 4)), whole[2:5, 3:7])
    assert torch.equal(whole.bfloat16().float(), whole) and not torch.equal(whole, weights.whole("b"))
    assert whole.std() == pytest.approx(0.02, rel=0.3)
    assert torch.equal(weights.whole("norm"), torch.ones(6))


LAUNCHER = """
import pathlib, signal, sys, time

def end(*_):
    pathlib.Path(sys.argv[1]).write_text("its ranks are ended")
    sys.exit(1)

signal.signal(signal.SIGTERM, end if sys.argv[2] == "heeds" else signal.SIG_IGN)
pathlib.Path(sys.argv[1]).write_text("began")
time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("launcher", "left"), [("heeds", "its ranks are ended"), ("does not", "began")])
def test_what_is_not_done_in_time_may_end_its_ranks_and_is_killed_else(
    launcher: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "ENDED_WITHIN", 60.0 if launcher == "heeds" else 0.5)
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path / "left"), launcher]
    assert run_ranks(command, more={}, limit=4) == "it was not done after 4 s"
    assert (tmp_path / "left").read_text() == left


@pytest.mark.processes
def test_a_program_that_fails_is_told_by_its_status() -> None:
    assert run_ranks([sys.executable, "-c", "exit(4)"], more={}, limit=60) == "exit status 4"
    looks = "import os; exit(os.environ['WORD'] != 'given')"
    assert run_ranks([sys.executable, "-c", looks], more={"WORD": "given"}, limit=60) == ""
