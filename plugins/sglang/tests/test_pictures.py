"""Checkpoints that read pictures: the server is started for their text, and on a GPU SGLang serves their exports.

python -m pytest plugins/sglang/tests/test_pictures.py -v      # the last test wants a GPU and SGLang
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.runs import sglang
from corerl.config import ModelConfig
from corerl_sglang.config import SglangConfig
from corerl_sglang.engine import SglangEngine
from tests.end_to_end.command import metrics
from tests.engines.models import context
from tests.pictures import FAMILIES, of_pictures, tensors_in, write_pictures

# Sizes for which SGLang's kernels are made.
TEXT = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.06,
}
STATES = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
WINDOWS = {
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    "sliding_window": 1024,
    "query_pre_attn_scalar": 64,
}
LARGER: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8]}},
    "qwen3_5": {
        **STATES,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
    },
    "gemma3": WINDOWS,
    "mistral3": {},
}
TOWER = {"hidden_size": 128, "intermediate_size": 256}
RUN = """
[run]
dir = "run"
steps = 2
[model]
path = "model"
tokenizer = "characters:0123456789>s"
[data]
source = "sort-digits"
[reward]
name = "position-match"
processes = 0
[rollout]
prompts = 8
samples = 8
max_tokens = 8
[train.optimizer]
lr = 1e-3
weight_decay = 0.1
[checkpoint]
export = true
[eval]
every = 0
"""
SERVE = """
import json, sys
import sglang

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    engine = sglang.Engine(
        model_path=asked["model"], skip_tokenizer_init=True, enable_multimodal=False, mem_fraction_static=0.3,
        max_total_tokens=4096,
        disable_cuda_graph=True, sampling_backend="pytorch", grammar_backend="none", log_level="error",
        attention_backend=asked["attention"], dtype="bfloat16",
    )
    found = engine.generate(
        input_ids=asked["prompts"], sampling_params={"max_new_tokens": 1, "temperature": 1.0},
        return_logprob=True, logprob_start_len=0,
    )
    print("FOUND" + json.dumps([[each[0] for each in one["meta_info"]["input_token_logprobs"][1:]] for one in found]))
    engine.shutdown()
"""


def write_larger(family: str, directory: Path) -> Path:
    """A checkpoint of the family in sizes that SGLang's kernels take."""
    fields = FAMILIES[family]
    text = {**fields["text_config"], **TEXT, **LARGER[family]}
    tower = {**fields["vision_config"], **TOWER}
    if "out_hidden_size" in tower:
        tower["out_hidden_size"] = TEXT["hidden_size"]
    if "head_dim" in tower:
        tower["head_dim"] = 64
    config = AutoConfig.for_model(family, **{**fields, "text_config": text, "vision_config": tower})
    return write_pictures(family, directory, config=config)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_server_is_started_for_text_alone(family: str, tmp_path: Path) -> None:
    directory = write_pictures(family, tmp_path / "model")
    given: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = []

    def configure(arguments: dict[str, Any]) -> None:
        at = Path(arguments["model_path"])
        given.append((arguments, json.loads((at / "config.json").read_text()), [file.name for file in at.iterdir()]))

    server = mock.Mock(directory=tmp_path / "own", configure=configure)
    server.get.return_value = {"internal_states": [{"memory_usage": {"weight": 1, "kvcache": 1}}]}
    (tmp_path / "own").mkdir()
    engine = SglangEngine(ModelConfig(path=str(directory)), SglangConfig(), context(), server)
    ((arguments, config, files),) = given
    assert arguments["enable_multimodal"] is False  # else it would want the files of a processor
    assert files == ["config.json"]
    assert config["architectures"] == json.loads((directory / "config.json").read_text())["architectures"]
    held = tensors_in(directory)
    assert engine._shapes == {name: tuple(each.shape) for name, each in held.items() if not of_pictures(name)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and SGLang")
@pytest.mark.processes
@pytest.mark.parametrize("family", LARGER)
def test_sglang_serves_what_was_trained_with_it(family: str, tmp_path: Path) -> None:
    attention = os.environ.get("ATTENTION", "triton")
    write_larger(family, tmp_path / "model")
    engine = sglang(attention_backend=attention, memory=0.3)
    train_two_steps(tmp_path, "cluster.device=cuda", "backend.name=fsdp", *engine, apart=0.02)
    export = tmp_path / "run/model"
    prompts = [[7, 4, 9, 5, 3, 14, 3, 4, 5, 7, 9, 2], list(range(3, 15))]
    asked = json.dumps({"model": str(export), "prompts": prompts, "attention": attention})
    (tmp_path / "serve.py").write_text(SERVE)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "serve.py")], input=asked, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[5:])
    model: Any = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32).eval()
    for prompt, logprobs in zip(prompts, found, strict=True):
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            wanted = model(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
        apart = (torch.tensor(logprobs) - wanted).abs()
        assert apart.mean() < 0.05, f"{apart.tolist()}"  # bfloat16 beside float32


def train_two_steps(directory: Path, *settings: str, apart: float) -> None:
    """Train the model in a directory; engine and trainer agree, and the export is the start but for its text."""
    (directory / "run.toml").write_text(RUN)
    call = [sys.executable, "-m", "corerl", "train", str(directory / "run.toml"), *settings]
    done = subprocess.run(call, cwd=directory, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [line for line in metrics(directory / "run") if "train/loss" in line]
    assert len(steps) == 2
    assert all(step["rollout/logprob_diff"] < apart for step in steps)
    before, after = tensors_in(directory / "model"), tensors_in(directory / "run/model")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name].to(after[name].dtype), after[name])}
    frozen = {name for name in before if of_pictures(name)}
    assert frozen and frozen <= same
    # In bfloat16 a step may be less than the rounding of a few vectors.
    assert all(before[name].dim() == 1 for name in same - frozen)
