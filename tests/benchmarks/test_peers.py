"""What is read and made of the steps of two sides."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest
from attrs import evolve

from benchmarks import runs
from benchmarks.peers import verl, work
from benchmarks.peers.verl import common, read_verl, report
from benchmarks.peers.work import CASES

# A line of verl 0.9.1's logger `file`, most metrics left out.
LINE = {
    "step": 3,
    "data": {
        "actor/pg_loss": -0.0012,
        "response_length/mean": 250.0,
        "response/aborted_ratio": 0.0,
        "timing_s/gen": 0.9,
        "timing_s/update_actor": 0.5,
        "timing_s/update_weights": 0.1,
        "timing_s/step": 1.6,
    },
}


def test_steps_of_verl_are_read_from_its_file_logger(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_verl(file) == []
    file.write_text(f"{json.dumps(LINE)}\n{json.dumps(LINE)[:40]}")  # the second is being written
    (step,) = read_verl(file)
    assert common("verl", step) == {"length": 250.0, "step": 1.6, "sampling": 0.9, "training": 0.5, "update": 0.1}


# In place of verl's: samples, has them scored, and notes when it works.
TRAINER = """
import json, os, sys, time
from benchmarks.peers import verl, work
total = int(next(word for word in sys.argv if word.startswith("trainer.total_training_steps")).split("=")[1])
work.compute_score("words", "w10", "")
noted = open(os.environ["NOTES"], "a", buffering=1)
noted.write("begins\\n")
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as sink:
    for step in range(total):
        time.sleep(0.3)
        if step == total - 1:
            noted.write("ends\\n")
        sink.write(json.dumps({"data": {"timing_s/step": 1.0 + step, "response_length/mean": 9.0}}) + "\\n")
        sink.flush()
print("trained", flush=True)
time.sleep(600)  # as engines that outlive it
"""


@pytest.mark.nightly
@pytest.mark.processes
def test_each_side_has_a_turn_of_its_own_and_is_ended_with_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "verl" / "trainer"
    package.mkdir(parents=True)
    (package / "main_ppo.py").write_text(TRAINER)
    path = os.pathsep.join([str(tmp_path / "site"), runs.ENVIRONMENT["PYTHONPATH"]])
    monkeypatch.setitem(runs.ENVIRONMENT, "PYTHONPATH", path)
    monkeypatch.setitem(runs.ENVIRONMENT, "NOTES", str(tmp_path / "notes"))
    monkeypatch.setattr(verl, "STARTS", dict.fromkeys(verl.SIDES, verl.start_verl))
    monkeypatch.setattr(verl, "common", lambda side, step: common("verl", step))
    words = {"side": "both", "tiny": True, "deadline": 60.0, "attention": "triton"}
    args = argparse.Namespace(**words, verl_set=[])
    case = evolve(CASES["ragged"], steps=2)
    made = verl.make("ragged", case, args, tmp_path, tmp_path / "checkpoint")
    assert (tmp_path / "notes").read_text().split() == ["begins", "ends"] * 2
    for side in ("corerl", "verl"):
        assert [step["step"] for step in made[side]] == [1.0, 2.0, 3.0, 4.0]
        assert "trained" in (tmp_path / f"ragged-{side}.log").read_text()
    args.side = "none"
    assert verl.make("ragged", case, args, tmp_path, tmp_path / "checkpoint") == made  # which were kept


def test_sides_are_compared_at_equal_tokens() -> None:
    first = [{"length": 9.0, "step": 99.0}, {"length": 9.0, "step": 9.0}]
    ours = [*first, {"length": 100.0, "step": 1.0}, {"length": 100.0, "step": 2.0}]
    other = [*first, {"length": 200.0, "step": 3.0}, {"length": 100.0, "step": 4.0}]
    found = report("ragged", CASES["ragged"], {"corerl": ours, "verl": other})
    assert found.comparisons[0].ratios == pytest.approx([100 / 150, 0.5])
    ratio, pooled, sampled = found.numbers[:3]
    assert ratio.values == pytest.approx([1.5, 2.0])
    assert pooled.values == pytest.approx([(200 / 3) / (300 / 7)])
    assert sampled.values == pytest.approx([64 * 100 / 1.0, 64 * 100 / 2.0])
    alone = report("ragged", CASES["ragged"], {"corerl": ours, "verl": []})
    assert not alone.comparisons and len(alone.numbers) == 3


def test_one_token_in_three_thousand_ends_a_ragged_sample() -> None:
    fields = work.fields_of(CASES["ragged"], tiny=False)
    assert fields["vocab_size"] / len(fields["eos_token_id"]) == pytest.approx(3000, rel=0.02)
    assert work.fields_of(CASES["long"], tiny=False)["eos_token_id"] == work.END


@pytest.mark.nightly
@pytest.mark.processes
def test_texts_of_the_tokenizer_become_the_same_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    work.write_checkpoint(tmp_path, work.fields_of(CASES["ragged"], tiny=True), device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    (text,) = work.prompts(1, vocabulary=97)
    tokens = [int(word[1:]) for word in text.split()]
    assert tokenizer(text).input_ids == tokens and min(tokens) >= work.SPECIAL
    asked = tokenizer.apply_chat_template([{"role": "user", "content": text}], return_dict=False)
    assert asked == tokens and tokenizer.decode(tokens) == text


def test_both_sides_give_a_response_the_same_reward() -> None:
    assert work.reward(None, "w10 w11 w12 w13") == 0.5
    assert work.compute_score("words", "w10 w11 w12 w13", "", extra_info={}) == 0.5
    assert work.reward(None, "") == 0.0


def test_packed_attention_for_peers_equals_rows_apart() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.peers import attention

    fields = work.fields_of(CASES["short"], tiny=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), attn_implementation="sdpa").eval()
    rows = [torch.randint(3, 97, (length,)) for length in (7, 30, 12)]
    apart = torch.cat([model(input_ids=row[None]).logits[0] for row in rows])
    model.set_attn_implementation(work.ATTENTION)
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed = model(input_ids=torch.cat(rows)[None], position_ids=positions, use_cache=False).logits[0]
    assert torch.allclose(packed, apart, atol=1e-5)
    assert attention.layout(positions).bounds.tolist() == [0, 7, 37, 49]
