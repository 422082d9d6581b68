"""Measure a pass forward and back over sequences of many lengths: packed, whole, and a bare loop on padded rows.

python -m benchmarks.layouts --output found/layouts.json
python -m benchmarks.layouts qwen3_5
python -m benchmarks.layouts --tiny

Models in bfloat16 without an optimizer: Gemma 3 of 1B (windows of 512 in five of six layers), 8 layers of Qwen3.5 0.8B
(gated delta nets in three of four), and 8 layers of GPT-OSS with 8 experts (sinks, windows of 128 in every other
layer). Packed and whole are CoreRL's policies; the bare loop is transformers' model on right-padded rows with its mask,
and cross-entropy of its logits. Sequences are put together by length for the padded sides, so that rows are nearly
full. All sides get the same weights, sequences and tokens per micro-batch, padding included.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.report import Comparison, Number, Report, finish, in_turns
from corerl.models.build import materialize, move_buffers, recompute_layers
from corerl.models.layouts import make_policy, own_attention
from corerl.ops.attention import PackedSequences
from corerl.types import Output

WINDOWS = ["sliding_attention"] * 5 + ["full_attention"]
STATES = ["linear_attention"] * 3 + ["full_attention"]


@frozen(kw_only=True)
class Case:
    what: str
    fields: Mapping[str, Any]
    sequences: int = 48
    longest: int = 2048
    tokens: int = 8192  # of a micro-batch

    @property
    def tiny(self) -> Case:
        """The same kinds of layers, for a CPU."""
        small = {
            **dict.fromkeys(("hidden_size", "intermediate_size"), 64),
            "vocab_size": 97,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "sliding_window": 8,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
        fields = {**self.fields, **{name: value for name, value in small.items() if name in self.fields}}
        fields |= {"num_hidden_layers": 6, "layer_types": list(self.fields["layer_types"])[:6]}
        return evolve(self, fields=fields, sequences=6, longest=40, tokens=96)


CASES = {
    "gemma3": Case(
        what="Gemma 3 1B",
        fields={
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "layer_types": (WINDOWS * 5)[:26],
        },
    ),
    "qwen3_5": Case(
        what="8 layers of Qwen3.5 0.8B",
        fields={
            "model_type": "qwen3_5_text",
            "vocab_size": 248320,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": STATES * 2,
            "tie_word_embeddings": True,
        },
        sequences=16,
        longest=1024,
    ),
    "gpt_oss": Case(
        what="8 layers of GPT-OSS with 8 experts",
        fields={
            "model_type": "gpt_oss",
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 8,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
    ),
}


class Layout:
    """A policy of CoreRL, packed or whole."""

    def __init__(self, name: str, model: Any) -> None:
        config, weight = model.config, next(model.parameters())
        self.policy = make_policy(config, dtype=weight.dtype, layout=name)
        recompute_layers(self.policy.model)
        materialize(self.policy.model, {name: nn.Parameter(each.detach()) for name, each in model.named_parameters()})
        move_buffers(self.policy.model, weight.device)
        self.policy.train()

    def __call__(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Log-probs of each sequence's tokens but the first."""
        lengths = [len(each) for each in sequences]
        packing = PackedSequences.of(np.concatenate([[0], np.cumsum(lengths)]), sequences[0].device)
        positions = torch.cat([torch.arange(length, device=sequences[0].device) for length in lengths])
        found = self.policy(torch.cat(list(sequences)), packing, positions, 1.0, (Output.LOGPROBS,))
        return [each[1:] for each in found[Output.LOGPROBS].split(lengths)]


class Bare:
    """transformers' model on right-padded rows, as one writes it by hand."""

    def __init__(self, model: Any) -> None:
        self.policy = model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def __call__(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        lengths = [len(each) for each in sequences]
        rows = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in sequences], batch_first=True)
        logits = self.policy(input_ids=rows, attention_mask=mask, use_cache=False).logits[:, :-1]
        found = [
            F.cross_entropy(of.float(), row, reduction="none") for of, row in zip(logits, rows[:, 1:], strict=True)
        ]
        return [-each[: length - 1] for each, length in zip(found, lengths, strict=True)]


def measure(case: Case, *, rounds: int, device: torch.device) -> Report:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**case.fields)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=own_attention(config))
    lengths = np.random.default_rng(0).integers(case.longest // 8, case.longest + 1, case.sequences)
    sequences = [torch.randint(3, config.vocab_size, (int(length),), device=device) for length in lengths]
    sides: dict[str, tuple[Any, list[list[Tensor]]]] = {
        "packed": (Layout("packed", model), list(_packed(sequences, case.tokens))),
        "whole": (Layout("whole", model), list(_padded(sequences, case.tokens))),
        "bare": (Bare(model), list(_padded(sequences, case.tokens))),
    }
    peaks: dict[str, list[float]] = {name: [] for name in sides}

    def timed(name: str) -> Callable[[int], float]:
        def once(_: int) -> float:
            run, micro_batches = sides[name]
            gc.collect()
            _settle(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            for micro in micro_batches:
                torch.cat(run(micro)).mean().backward()
            _settle(device)
            ended = time.perf_counter()
            if device.type == "cuda":
                peaks[name].append(torch.cuda.max_memory_allocated() / 2**30)
            run.policy.zero_grad(set_to_none=True)
            return ended - began

        return once

    with torch.no_grad():
        found = {name: torch.cat(run(sequences[:4])) for name, (run, _) in sides.items()}
        exact = torch.cat(Bare(copy.deepcopy(model).float())(sequences[:4]))
    apart = {name: float((each - exact).abs().mean()) for name, each in found.items()}
    for name in sides:
        timed(name)(0)
    packed, beside_packed = in_turns(rounds, timed("packed"), timed("bare"))
    whole, beside_whole = in_turns(rounds, timed("whole"), timed("bare"))
    tokens, cells = int(lengths.sum()), sum(len(each) * max(map(len, each)) for each in sides["bare"][1])
    against = "transformers on padded rows"
    return Report(
        name="layouts",
        size=f"{case.what}, {case.sequences} sequences of {lengths.min()} to {lengths.max()} tokens, {tokens:,} in all",
        comparisons=[
            Comparison(what="packed", against=against, ours=packed, other=beside_packed),
            Comparison(what="whole", against=against, ours=whole, other=beside_whole),
        ],
        numbers=[
            *(Number(what=f"{name}: peak memory", values=peaks[name], unit="GiB") for name in sides if peaks[name]),
            *(
                Number(what=f"{name}: mean log-prob difference", values=[off], unit="nats")
                for name, off in apart.items()
            ),
        ],
        note=(
            f"Forward and backward with recomputed layers in {dtype}, {case.tokens} tokens in a micro-batch; padded "
            f"rows are {tokens / cells:.0%} full. Differences are to the same in float32, of {len(exact):,} tokens."
        ),
    )


def _packed(sequences: Sequence[Tensor], tokens: int) -> Iterator[list[Tensor]]:
    """In the order in which they came, so many tokens at a time."""
    micro: list[Tensor] = []
    for each in sequences:
        if micro and sum(map(len, micro)) + len(each) > tokens:
            yield micro
            micro = []
        micro.append(each)
    yield micro


def _padded(sequences: Sequence[Tensor], tokens: int) -> Iterator[list[Tensor]]:
    """The longest first, so many tokens and padding at a time."""
    micro: list[Tensor] = []
    for each in sorted(sequences, key=len, reverse=True):
        if micro and (len(micro) + 1) * len(micro[0]) > tokens:
            yield micro
            micro = []
        micro.append(each)
    yield micro


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", choices=[[], *CASES], help="all of them if none is named")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a size for the CPU: does it run?")
    parser.add_argument("--output", type=Path, help="a file for the result, .json or .md")
    args = parser.parse_args()
    cases = [CASES[name] for name in args.case or CASES]
    device = torch.device("cpu" if args.tiny else "cuda")
    for case in cases:
        output = args.output and args.output.with_stem(f"{args.output.stem}-{case.fields['model_type']}")
        finish(measure(case.tiny if args.tiny else case, rounds=args.rounds, device=device), output)
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
