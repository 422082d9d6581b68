"""Every file in examples/ runs as it stands, but for its size and for what a machine without a GPU cannot give."""

from __future__ import annotations

import string
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from corerl.models.tokenizer import load_tokenizer
from tests.end_to_end.command import ROOT, Command, metrics

SMALL = ["run.steps=2", "eval.every=1", "data.held_out=8", "checkpoint.export=false", 'extensions=[{name="jsonl"}]']
# What trains the others in `make test`: `.ci/wheels.py` the quickstart, test_modes.py with a critic, test_pictures.py,
# tests/examples and plugins/reasoning-gym/tests.
QUICK = "gsm8k-qwen3-0.6b.toml"
EXAMPLES = {
    "quickstart.toml": ["rollout.prompts=8", "rollout.samples=4"],
    "quickstart-ppo.toml": ["rollout.prompts=16"],
    "pictures.toml": ["rollout.prompts=8", "rollout.samples=4"],
    "reasoning_gym.toml": ["rollout.prompts=8", "rollout.samples=4"],
    "compaction.toml": ["rollout.prompts=8", "rollout.samples=4"],
    "two_turn_tool.toml": ["rollout.prompts=8", "rollout.samples=4"],
    "gsm8k-qwen3-0.6b.toml": [
        *("cluster.device=cpu", "train.precision=float32", "rollout.prompts=4", "rollout.samples=4"),
        *("rollout.max_tokens=6", "model.path=model", "data.source=rows.parquet"),
    ],
}
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_model(directory: Path) -> None:
    """A small Qwen3 of random weights, with a tokenizer of one token a character that has a chat template."""
    tokenizer = load_tokenizer(tokenizer=f"characters:{string.printable}", path="")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(directory)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


def write_rows(path: Path) -> None:
    """Rows made up in GSM8K's form."""
    rows = [{"question": f"What is {n} plus 2?", "answer": f"{n} + 2 = {n + 2}\n#### {n + 2}"} for n in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_no_example_is_left_out() -> None:
    served = "serve.toml"  # which is for `corerl serve`, and tested with it
    assert {*EXAMPLES, served} == {path.name for path in (ROOT / "examples").glob("*.toml")}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == QUICK else [pytest.mark.nightly]) for name in EXAMPLES]
)
def test_an_example_trains_two_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.parquet")
    monkeypatch.chdir(tmp_path)  # where model.path and data.source are looked for
    with Command(
        "train", ROOT / "examples" / name, *EXAMPLES[name], *SMALL, f"run.dir={tmp_path}/run", logs=tmp_path
    ) as command:
        assert command.finish() == 0, command.err
        command.assert_nothing_is_left()
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "train/loss" in line] == [0, 1]
    assert [line["step"] for line in lines if "eval/reward" in line] == [0, 1, 2]
    assert all(line["train/skipped_steps"] == 0.0 for line in lines if "train/loss" in line)
