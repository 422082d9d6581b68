"""The work that CoreRL and a peer are given: one checkpoint with random weights, a tokenizer, prompts and a reward.

Each token of the tokenizer is a word, `w17` for example, so that any sampled row of tokens has a text, and a text the
same tokens on both sides.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from benchmarks.shapes import SHAPES, tiny_shape

PAD, BEGIN, END, NEWLINE = range(4)  # token ids
SPECIAL = 4  # the first token id that is a word
SHORTEST, LONGEST = 10, 100  # tokens of a prompt
TURN = "PEERS_TURN"  # environment variable: a directory of a side's two files
ARRIVED, GO = "arrived", "go"  # the side has samples; it may go on with them
ATTENTION = "packed"  # the name under which peers/attention.py registers


@frozen(kw_only=True)
class Case:
    """What a step does."""

    shape: str  # of benchmarks.shapes
    new: int  # the most tokens of a sample
    ends_every: int = 0  # of so many token ids one ends a sample; 0: a single one of the vocabulary
    lora: int = 0  # rank of adapters on all linear layers; 0: all weights are trained
    adapters: bool = False  # engines get the adapters alone, not merged into the weights
    micro_batch: int = 16384  # tokens
    memory: float = 0.5  # the engine's share of the GPU, for weights and KV cache
    warm: int = 2  # steps that do not count: kernels are compiled, graphs are captured
    steps: int = 2  # that count
    fused: str = "triton"  # verl's kernels for log-probs
    target: float = 1.2  # tokens a second of CoreRL over those of the peer


CASES: Mapping[str, Case] = {
    "short": Case(shape="0.6b", new=256, steps=4),
    "long": Case(shape="0.6b", new=4080, steps=3),
    "ragged": Case(shape="0.6b", new=4080, ends_every=3000, steps=6),
    "lora-8b": Case(shape="8b", new=256, lora=32, steps=3, micro_batch=8192, fused="torch"),
    "lora-8b-adapters": Case(
        shape="8b", new=256, lora=32, adapters=True, steps=3, micro_batch=8192, fused="torch", target=1.4
    ),
}


def tiny_case(case: Case) -> Case:
    """The same in a size for CPUs."""
    return evolve(case, new=12, micro_batch=512)


def fields_of(case: Case, *, tiny: bool) -> dict[str, Any]:
    """The fields of the model's config."""
    fields = dict(SHAPES[case.shape])
    if tiny:
        fields = tiny_shape(fields)
    step = case.ends_every if not tiny else min(case.ends_every, 10)
    ends = [END, *range(step, fields["vocab_size"], step)] if step else END
    # verl's fused kernels read the head's weights as they are, and FSDP2 shards a head of its own apart: 0.9.1 ends
    # with "mixed torch.Tensor and DTensor", with its Triton kernel in an illegal memory access.
    fields["tie_word_embeddings"] = True
    return {**fields, "eos_token_id": ends, "bos_token_id": BEGIN, "pad_token_id": PAD}


def write_checkpoint(directory: Path, fields: Mapping[str, Any], *, device: str) -> None:
    """The model in bfloat16, in a process of its own: what it held of `device` is free afterwards."""
    if not (directory / "done").exists():
        process = multiprocessing.get_context("spawn").Process(target=_write, args=(directory, dict(fields), device))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"the checkpoint could not be written: its process ended with {process.exitcode}")
        (directory / "done").touch()


def _write(directory: Path, fields: dict[str, Any], device: str) -> None:
    import torch
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.bfloat16)
    model.generation_config.eos_token_id = fields["eos_token_id"]
    model.save_pretrained(directory, max_shard_size="4GB")
    # Special tokens are found within words too. verl asks a tokenizer of this kind of model for two that Qwen's has.
    special = {"<pad>": PAD, "<begin>": BEGIN, "<|im_end|>": END, "\n": NEWLINE}
    words = special | {f"w{token}": token for token in range(SPECIAL, fields["vocab_size"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<begin>", eos_token="<|im_end|>", pad_token="<pad>", unk_token="<pad>"
    )
    tokenizer.add_tokens([AddedToken("\n", normalized=False)])
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(directory)


def prompts(count: int, *, vocabulary: int, longest: int = LONGEST) -> list[str]:
    """Texts of `SHORTEST` to `longest` tokens."""
    numbers = random.Random(0)
    lengths = [numbers.randint(SHORTEST, longest) for _ in range(count)]
    return [" ".join(f"w{numbers.randrange(SPECIAL, vocabulary)}" for _ in range(length)) for length in lengths]


def write_prompts(directory: Path, texts: Sequence[str]) -> tuple[Path, Path]:
    """As CoreRL reads them, and as verl does."""
    ours, verl = directory / "prompts.jsonl", directory / "verl.jsonl"
    ours.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts))
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number, text in enumerate(texts)
    ]
    verl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ours, verl


def score(response: str) -> float:
    """The share of words with an even number: samples of a group differ in it, so that none has an advantage of 0."""
    words = response.split()
    return sum(word[-1] in "02468" for word in words) / max(len(words), 1)


def wait_for_turn() -> None:
    """Until the comparison says that nobody else uses the machine."""
    if directory := os.environ.get(TURN):
        (Path(directory) / ARRIVED).touch()
        while not (Path(directory) / GO).exists():
            time.sleep(0.05)


def reward(prompt: Any, response: str) -> float:
    """As CoreRL calls it."""
    wait_for_turn()
    return score(response)


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """As verl calls it."""
    wait_for_turn()
    return score(solution_str)
