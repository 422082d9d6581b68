"""Small inputs of runs: a checkpoint, written by hand as two ranks would write it, the directory of a run, and chats
with a refused one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from transformers import AutoModelForCausalLM, PreTrainedModel

from corerl.checkpoint.commit import begin, commit
from corerl.checkpoint.writer import stage, write
from corerl.config.schema import CheckpointConfig, Config, RunConfig
from corerl.config.structuring import structure
from corerl.config.toml_text import to_plain
from corerl.data.prompts import SortDigits
from corerl.driver.run_dir import occupied, write_config
from corerl.models.config import hf_config
from corerl.models.tokenizer import character_tokenizer
from corerl.weights.chunks import Chunk

KEYS = ("master", "exp_avg", "exp_avg_sq")
DATA: dict[str, Any] = {
    "backend": {"name": "plain"},
    "extensions": [],
    "model": {
        "tokenizer": "characters:0123456789>s",
        "config": {
            "model_type": "qwen3",
            "vocab_size": 16,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "tie_word_embeddings": True,
        },
    },
    "data": {"held_out": 16},
    "rollout": {"engine": "fake", "prompts": 8, "samples": 4},
}
CRITIC: dict[str, Any] = {"algorithm": {"name": "ppo"}, "roles": {"critic": {"ranks": 1}}}  # tables of one that has one
TEACHER: dict[str, Any] = {"algorithm": {"name": "distill"}, "roles": {"teacher": {"ranks": 1}}}


def make_config(**tables: Any) -> Config:
    """The configuration above, with tables put in the place of its own."""
    return structure({**DATA, **tables}, Config, path="")


def config_in(run_dir: Path, resume: str = "never", **tables: Any) -> Config:
    return evolve(make_config(**tables), run=RunConfig(dir=str(run_dir)), checkpoint=CheckpointConfig(resume=resume))


def make_model(config: Config, *, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config(config.model), dtype=torch.float32)
    return model


def save(
    run_dir: Path, config: Config, model: PreTrainedModel, *, step: int, state: dict[str, Any] | None = None
) -> Path:
    """Rank 0 holds the first half of the tensors, rank 1 the others. `state`: what the run writes beside its roles."""
    partial = begin(run_dir, step)
    params = list(model.named_parameters())
    for rank in range(2):
        chunks = [
            Chunk(name, tuple(param.shape), (0,) * param.dim(), tuple(param.shape), param.detach())
            for name, param in params[rank::2]
        ]
        write(stage(dict.fromkeys(KEYS, chunks), {}), partial / "actor", rank)
    return commit(partial, state or recorded(config, step), ranks={"actor": 2})


def recorded(config: Config, step: int) -> dict[str, Any]:
    """What a run writes beside its roles."""
    record = SortDigits(held_out=config.data.held_out, seed=0).record
    stand = {"epoch": 0, "offset": 8 * step, "taken": 8 * step}
    return {
        "rollout_step": step,
        "source": {"rollout_step": step, "prompts": {"data": record["identity"], "seed": 0, "sources": [stand]}},
        "data": record,
        "config": to_plain(evolve(config, train=config.train.settled("cpu"))),
    }


def begun(run_dir: Path, config: Config) -> Path:
    """The directory with what a run writes first."""
    write_config(run_dir, to_plain(config))
    return run_dir


@contextmanager
def occupying(run_dir: Path) -> Iterator[None]:
    """The directory is taken, as it is while a run is running there."""
    with occupied(run_dir):
        yield


def chats_of(tmp_path: Path, *, bad: int) -> dict[str, Any]:
    """A model and 20 chats, of which its tokenizer's template refuses one."""
    tokenizer = character_tokenizer("0123456789>s")
    tokenizer.chat_template = (
        "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}{{ messages[0].content }}>"
        "{% if brief %}s{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"prompt": [{"role": "user", "content": "7"}] * (1 + (n == bad)), "number": n} for n in range(20)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {**DATA["model"], "tokenizer": str(tmp_path / "tokenizer")},
        "data": {"source": str(tmp_path / "chats.jsonl"), "held_out": 2},
    }
