"""What one run of the quickstart's task, scaled down, writes and prints."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM, AutoTokenizer

from corerl.checkpoint.reader import CheckpointSource
from corerl.cli.main import main
from corerl.config.load import load_config
from corerl.plan.resolve import resolve_tables, settle_algorithm
from corerl_testing import tolerances
from tests.end_to_end.command import metrics
from tests.end_to_end.conftest import Finished

STEPS = 6
ROLLOUT = ["reward", "reward_std", "response_length", "truncated", "tokens", "exact_match"]
APART = ["logprob_diff", "logprob_diff_max", "logprob_kl", "logprob_diff_above_0.1", "logprob_diff_above_1"]
STALE = ["staleness", "staleness_max", "staleness_fraction/0", "continued"]
TRAIN = ["loss", "policy_loss", "entropy", "kl", "ratio", "clip_fraction", "approx_kl", "grad_norm", "lr", "tokens"]
TIMES = ["rollout", "reward", "forward", "train", "update_weights", "step"]


def of_steps(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run_dir) if "train/loss" in line]


def held_out_answers(run_dir: Path, step: int) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "held-out" and line["step"] == step]


def test_the_written_config_is_the_resolved_one(
    uninterrupted: Finished, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command puts the working directory there
    written = uninterrupted.run_dir / "config.toml"
    assert main(["config", "check", str(written)]) == 0
    assert capsys.readouterr() == (f"{written}: ok\n", "")
    given = load_config(uninterrupted.config, [*uninterrupted.overrides, f"run.dir={uninterrupted.run_dir}"])
    settled = evolve(
        settle_algorithm(given), train=given.train.settled("cpu")
    )  # what the run took for what was left open
    assert resolve_tables(load_config(written)) == resolve_tables(settled)


def test_metrics_tell_of_every_step_and_every_evaluation(uninterrupted: Finished) -> None:
    steps = of_steps(uninterrupted.run_dir)
    assert [line["step"] for line in steps] == list(range(STEPS))
    wanted = [f"rollout/{name}" for name in [*ROLLOUT, *APART, *STALE]]
    wanted += [f"train/{name}" for name in [*TRAIN, "skipped_steps"]]
    wanted += [f"time/{name}" for name in TIMES] + ["perf/tokens_per_second"]
    assert all(set(wanted) <= set(line) for line in steps)
    assert [line["train/skipped_steps"] for line in steps] == [0.0] * STEPS
    assert steps[-1]["train/lr"] == pytest.approx(0.1 * 2e-3)  # the schedule's end: final_ratio of the peak
    evaluations = [line for line in metrics(uninterrupted.run_dir) if "eval/reward" in line]
    assert [line["step"] for line in evaluations] == [0, 3, 6]
    assert all({"eval/exact_match", "eval/response_length"} <= set(line) for line in evaluations)


def test_trainer_and_engine_agree_on_logprobs(uninterrupted: Finished) -> None:
    worst = [line["rollout/logprob_diff_max"] for line in of_steps(uninterrupted.run_dir)]
    assert len(worst) == STEPS and max(worst) <= tolerances.ENGINE_LOGPROBS


def test_the_reference_policy_is_the_one_that_training_began_with(uninterrupted: Finished) -> None:
    steps = of_steps(uninterrupted.run_dir)
    moved = [line["train/kl_reference"] for line in steps]  # of the old policy: with k1, the mean of log(p_old / p_ref)
    assert moved[0] == pytest.approx(0.0, abs=1e-6)  # in the first step the old policy is the reference
    assert min(abs(each) for each in moved[1:]) > 1e-4
    for line in steps:
        parts = line["train/policy_loss"] + 0.1 * line["train/kl"] - 0.01 * line["train/entropy"]
        assert line["train/loss"] == pytest.approx(parts, rel=1e-4)


def test_output_to_a_file_has_no_control_codes(uninterrupted: Finished) -> None:
    out, run_dir = uninterrupted.out, uninterrupted.run_dir
    assert uninterrupted.err == ""
    assert [character for character in out if not character.isprintable() and character != "\n"] == []
    lines = out.splitlines()
    assert lines[0] == "grpo on sort-digits: qwen3 from scratch, 2 fsdp ranks, 1 transformers engine, cpu"
    assert any(re.fullmatch(r"finished after 6 of 6 steps, .*", line) for line in lines)
    answers = held_out_answers(run_dir, 6)
    assert len(answers) == 3
    for answer in answers:
        assert any(line.startswith(answer["prompt"]) and answer["response"] in line for line in lines)
    assert lines[-3:] == [
        f"run directory  {run_dir}",
        f"checkpoint     {run_dir}/checkpoints/step-00000006",
        f"model          {run_dir}/model",
    ]


def test_the_exported_model_answers_as_the_engine_did(uninterrupted: Finished) -> None:
    run_dir = uninterrupted.run_dir
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model", local_files_only=True)
    source = CheckpointSource(run_dir / "checkpoints/step-00000006/actor", "master")
    weights = dict(model.named_parameters())
    assert weights.keys() == source.shapes.keys()  # the embedding is tied, so both have it once
    for name, shape in source.shapes.items():
        assert torch.equal(weights[name], source.read(name, (0,) * len(shape), shape)), name
    for answer in held_out_answers(run_dir, 6):
        prompt = tokenizer(answer["prompt"], return_tensors="pt")
        tokens = model.generate(**prompt, do_sample=False, max_new_tokens=7, pad_token_id=0)
        response = tokens[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(response, skip_special_tokens=True) == answer["response"]
