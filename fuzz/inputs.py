"""Valid configs, data, models and checkpoints, small enough that a command on them takes a tenth of a second."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from corerl.checkpoint.commit import begin, commit
from corerl.checkpoint.writer import stage, write
from corerl.config.load import load_config, recorded
from corerl.config.schema import ModelConfig
from corerl.config.toml_text import to_plain
from corerl.data.rows import load_prompts
from corerl.models.config import hf_config
from corerl.models.tokenizer import character_tokenizer
from corerl.weights.chunks import Chunk
from tests.end_to_end.command import SMALL

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REWARDS = """
def score(prompt, response, answer, **fields):
    return float(response == answer)
"""
HERE = {
    "backend": {"name": "plain"},
    "extensions": [],
    "cluster": {"device": "cpu"},
    "train": {"tokens_per_micro_batch": 1024},
    "eval": {"every": 0, "at_start": False},
    "checkpoint": {"background": False},
    "weights": {"transport": "disk"},
}
FIELDS: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 104,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
    }
]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TEXTS: list[dict[str, Any]] = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "level": n} for n in range(12)]
CHATS: list[dict[str, Any]] = [
    {
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": f"{n}+{n}?"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": str(2 * n)},
        ],
        "tools": TOOLS,
        "answer": str(2 * n),
    }
    for n in range(8)
]
ROLLOUT = {"engine": "fake", "prompts": 4, "samples": 2, "max_tokens": 7}


def write_inputs(directory: Path) -> None:
    """Write them below `directory`, which becomes the working directory: the configs name files relative to it."""
    os.chdir(directory)
    _write_models()
    _write_data()
    _write_configs()
    _write_checkpoints()
    _write_odd()


def _model(seed: int, fields: dict[str, Any]) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config(ModelConfig(config=fields)))
    return model


def _write_models() -> None:
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.chat_template = TEMPLATE
    _model(0, FIELDS).save_pretrained("model")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    sharded = FIELDS | experts | {"model_type": "qwen3_moe", "tie_word_embeddings": False}
    _model(1, sharded).save_pretrained("sharded", max_shard_size="8KB")
    for directory in ("model", "sharded"):
        tokenizer.save_pretrained(directory)


def _write_data() -> None:
    import pyarrow as pa
    from pyarrow import parquet

    for name, rows in (("texts", TEXTS), ("chats", CHATS)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alike = [{**row, "prompt": [{**message, "content": "4?"} for message in row["prompt"]]} for row in CHATS]
    parquet.write_table(pa.Table.from_pylist(alike), "chats.parquet")  # a column has one type
    os.mkdir("saved")
    table = pa.Table.from_pylist(TEXTS)
    with pa.ipc.new_stream("saved/data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "0", "_split": "train"}
    Path("saved/state.json").write_text(json.dumps(state))
    Path("saved/dataset_info.json").write_text("{}")
    Path("rewards.py").write_text(REWARDS)


def _write_configs() -> None:
    Path("small.toml").write_text(SMALL.replace('"fsdp"', '"plain"').replace('"sort-digits"', '"texts.jsonl"'))
    small = load_config("small.toml", ["data.held_out=2", "rollout.engine=fake", "roles.actor.ranks=1"])
    model = {"path": "model"}
    tables: dict[str, dict[str, Any]] = {
        # Every setting, as the run's own file has it.
        "full": to_plain(small),
        "texts": {"model": model, "data": {"source": "texts.jsonl", "held_out": 2}},
        "chats": {
            "model": model,
            "data": {"source": "chats.jsonl", "held_out": 2, "chat": True, "system": "Add."},
            "reward": {"name": "exact-match"},
        },
        "mixture": {
            "model": model,
            "data": {
                "held_out": 1,
                "sources": [
                    {"name": "a", "source": "texts.jsonl", "weight": 2.0},
                    {"name": "b", "source": "saved", "weight": 1},
                ],
            },
        },
        "critic": {
            "model": model,
            "algorithm": {"name": "ppo", "kl_coef": 0.01},
            "roles": {"actor": {"ranks": 1}, "critic": {"ranks": 1}},
            "data": {"source": "texts.jsonl", "held_out": 2},
        },
        "experts": {
            "model": {"path": "sharded"},
            "algorithm": {"routing_replay": "recompute", "old_logprobs": "recompute"},
            "data": {"source": "texts.jsonl", "held_out": 2},
        },
    }
    for name, own in tables.items():
        common = {} if name == "full" else {**HERE, "rollout": ROLLOUT, "run": {"steps": 1, "dir": "new"}}
        Path(f"{name}.toml").write_text(tomli_w.dumps({**common, **own}))


def _write_checkpoints() -> None:
    """Of the model in `model`, and of one from a config's fields, each as two ranks would write it."""
    for run_dir, override in (("run", "model.path=model"), ("fields", f"model.config={_inline(FIELDS)}")):
        more = [f"model.tokenizer=characters:{CHARACTERS[:90]}", "model.path="] if run_dir == "fields" else []
        config = load_config("texts.toml", [override, *more, f"run.dir={run_dir}", "run.steps=9"])
        for step in (4, 8):
            partial = begin(run_dir, step)
            params = list(_model(step, FIELDS).named_parameters())
            for rank in range(2):
                chunks = [
                    Chunk(name, tuple(param.shape), (0,) * param.dim(), tuple(param.shape), param.detach())
                    for name, param in params[rank::2]
                ]
                extra = {"rng": torch.arange(3), "count": step}
                write(stage(dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), chunks), extra), partial / "actor", rank)
            source = load_prompts(config.data, seed=config.run.seed)
            stand = {"epoch": 0, "offset": step, "prompts": len(source.train), "taken": step}
            position = {"data": source.record["identity"], "seed": config.run.seed, "sources": [stand]}
            state = {
                "rollout_step": step,
                "source": {"rollout_step": step, "prompts": position},
                "data": source.record,
                "config": to_plain(recorded(config)),
            }
            commit(partial, state, ranks={"actor": 2})


def _inline(fields: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{name} = {json.dumps(value)}" for name, value in fields.items()) + "}"


def _write_odd() -> None:
    """What a path may lead to."""
    os.makedirs("odd/empty")
    os.symlink("loop", "odd/loop")
    os.symlink("nowhere", "odd/dangling")
    os.symlink("..", "odd/up")
    Path("odd/blank").touch()
    Path("odd/holes").touch()
    os.truncate("odd/holes", 2**26)
    Path("odd/\x1b[31mred\n").write_text("{}")
    save_file({"a": torch.zeros(0, 3), "b": torch.tensor(1)}, "odd/other.safetensors")
