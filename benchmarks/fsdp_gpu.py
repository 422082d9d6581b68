"""Measure a compiled optimizer step of the FSDP backend on one GPU, against a bare compiled loop: tokens/s and MFU.

python -m benchmarks.fsdp_gpu --output found/fsdp.json
python -m benchmarks.fsdp_gpu 0.6b
python -m benchmarks.fsdp_gpu --lora 32
python -m benchmarks.fsdp_gpu --tiny

8 layers of the Qwen3-8B shape, 2.79 B parameters, 16k tokens in packed sequences of 2k; or the whole 0.6B shape, four
times 16k tokens in sequences of 512, as in a GRPO step. bfloat16, with float32 weights, gradients and moments. The bare
loop is what one would write by hand: transformers' model, torch's varlen attention, each layer compiled and wrapped by
`fully_shard`, fused AdamW. Both are on the GPU all the time, so the slice needs 120 GiB. `steps` defines FLOPs and MFU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from benchmarks.report import Comparison, Number, Report, finish, in_turns
from benchmarks.steps import (
    DIFFERENT,
    GIB,
    OPTIMIZER,
    PEAK,
    QWEN3_600M,
    SLICE,
    TARGET,
    Plugin,
    QuickWeights,
    Work,
    clipped_loss,
    device_of,
    facts,
    flops,
    join,
    packed_batch,
    timed,
)
from corerl.config import LoraConfig
from corerl.types import MicroBatch, PackedBatch

VARLEN = "bare_varlen"
CHUNK = 2048  # tokens whose logits the bare loop holds at a time
KERNELS = 30  # that are told of a step, the longest first


@frozen(kw_only=True)
class Case(Work):
    compile: bool = True

    @property
    def tiny(self) -> Case:
        """The same case for the CPU, where compiling takes a minute and says nothing."""
        return evolve(self, compile=False, **self.on_cpu())


CASES = {
    "slice": Case(what="8 layers of the 8B shape", fields=SLICE, tokens=16384, micro_batches=1),
    "0.6b": Case(what="the 0.6B shape", fields=QWEN3_600M, sequence=512, tokens=16384, micro_batches=4),
}


class BareModel(nn.Module):
    """Hidden states to log-probs of the next tokens, some tokens' logits at a time, made again for backward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, temperature: float, **packing: Any) -> Tensor:
        hidden = self.model.model(input_ids=tokens[None], use_cache=False, **packing).last_hidden_state[0]
        head = self.model.lm_head.weight.to(hidden.dtype)

        def part(states: Tensor, targets: Tensor) -> Tensor:
            return -F.cross_entropy((states @ head.t()).float() / temperature, targets, reduction="none")

        following = torch.cat([tokens[1:], tokens[:1]])  # behind a sequence's last token stands one without a weight
        return torch.cat(
            [
                checkpoint(part, states, targets, use_reentrant=False)
                for states, targets in zip(hidden.split(CHUNK), following.split(CHUNK), strict=True)
            ]
        )


class Bare:
    """A loop as one writes it by hand, of the weights that the plugin begins with; where that trains adapters, passes
    alone, without any gradient of a weight. Called in its process group."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self._device = device
        AttentionInterface.register(VARLEN, varlen if device.type == "cuda" else by_sequence)
        AttentionMaskInterface.register(VARLEN, lambda *_, **__: None)
        config = AutoConfig.for_model(**case.fields)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=VARLEN)
        params = dict(model.named_parameters())
        weights = QuickWeights({name: tuple(param.shape) for name, param in params.items()}, device)
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(weights.whole(name))
        if case.lora is not None:  # frozen, and what the loss depends on begins behind the embedding
            model.to(getattr(torch, case.precision)).requires_grad_(False)
            model.model.embed_tokens.register_forward_hook(lambda _, given, states: states.requires_grad_())
        if case.recompute == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        mixed = MixedPrecisionPolicy(param_dtype=getattr(torch, case.precision), reduce_dtype=torch.float32)
        mesh = init_device_mesh(device.type, (1,))
        for layer in model.model.layers:
            if case.compile:
                layer.compile()
            fully_shard(layer, mesh=mesh, mp_policy=mixed)
        self._model = BareModel(model.train())
        fully_shard(self._model, mesh=mesh, mp_policy=mixed)
        self._params = [param for param in self._model.parameters() if param.requires_grad]
        if not self._params:
            return
        self._optimizer = torch.optim.AdamW(
            self._params, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=0.0, fused=True
        )

    def train(self, batch: PackedBatch) -> float:
        """The gradient's norm before it is clipped."""
        for micro in batch.micro_batches:
            self._loss(micro, batch.temperature).backward()
        if not self._params:
            return math.nan
        norm = nn.utils.clip_grad_norm_(self._params, OPTIMIZER.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm.full_tensor())  # type: ignore[attr-defined]  # a DTensor's

    def _loss(self, micro: MicroBatch, temperature: float) -> Tensor:
        tokens, positions = (torch.tensor(x, device=self._device) for x in (micro.tokens, micro.positions))
        bounds = torch.tensor(micro.cu_seqlens, dtype=torch.int32, device=self._device)
        longest = int(np.diff(micro.cu_seqlens).max())
        logprobs: Tensor = self._model(
            tokens,
            temperature,
            position_ids=positions[None],
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=longest,
            max_length_k=longest,
        )
        return clipped_loss(logprobs[:-1], None, micro, self._device)


def varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **packing: Any
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D]; returns [1, T, H, D]. Heads are repeated: what torch 2.11
    asks for, and the limit was measured with."""
    from torch.nn.attention.varlen import varlen_attn  # registers CUDA operators

    groups = query.shape[1] // key.shape[1]
    q, k, v = (
        x[0].transpose(0, 1).contiguous() for x in (query, *(x.repeat_interleave(groups, 1) for x in (key, value)))
    )
    bounds, longest = packing["cu_seq_lens_q"], packing["max_length_q"]
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0))  # back without end: causal
    assert isinstance(out, Tensor)  # a pair only where the softmax's normalizer is asked for
    return out[None], None


def by_sequence(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **packing: Any
) -> tuple[Tensor, None]:
    """The same on a CPU, where there is no such kernel."""
    bounds = packing["cu_seq_lens_q"].tolist()
    parts = []
    for start, end in itertools.pairwise(bounds):
        q, k, v = (x[:, :, start:end] for x in (query, key, value))
        parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    return torch.cat(parts, dim=2).transpose(1, 2), None


@define(kw_only=True)
class Found:
    """What both have done so far; written to the file again after every round."""

    case: Case
    output: str | None
    ours: list[float] = field(factory=list)  # seconds, one a round
    other: list[float] = field(factory=list)
    norms: tuple[list[float], list[float]] = field(factory=lambda: ([], []))  # of every step's gradient
    peaks: dict[str, float] = field(factory=dict)  # bytes that torch held at most, with both models there

    @property
    def report(self) -> Report:
        case, lengths = self.case, self.case.samples(1)
        tokens, work = int(lengths.sum()), flops(case.fields, lengths)
        rounds = min(len(self.ours), len(self.other))
        numbers = []
        for who, seconds in (("the plugin", self.ours), ("the bare loop", self.other)):
            if seconds:
                numbers += [
                    Number(what=f"{who}: tokens a second", values=[tokens / each / 1e3 for each in seconds], unit="k"),
                    Number(what=f"{who}: MFU", values=[100 * work / each / PEAK for each in seconds], unit="%"),
                ]
        numbers += [
            Number(what=f"{who}: torch's peak, both models there", values=[peak / GIB], unit="GiB")
            for who, peak in self.peaks.items()
        ]
        # Both are graphs of the same mathematics; what they round differs, and grows from step to step.
        mine, its = (norms[:2] for norms in self.norms)
        same = self.case.lora is not None or np.allclose(mine, its, rtol=1e-3 if case.precision == "float32" else 5e-2)
        how = "compiled layers" if case.compile else "no compiling"
        return Report(
            name="fsdp_gpu",
            size=f"{case.what}, {case.micro_batches} x {case.tokens} tokens in sequences "
            f"of {case.sequence}, {how}, recompute {case.recompute}"
            + (f", adapters of rank {case.lora.rank}" if case.lora is not None else ""),
            comparisons=[
                Comparison(
                    what=f"a step of {tokens} tokens",
                    against="a bare fully_shard loop" if case.lora is None else "passes alone, all weights frozen",
                    ours=self.ours[:rounds],
                    other=self.other[:rounds],
                    target=round(1 / TARGET, 3),
                )
            ]
            if rounds
            else [],
            numbers=numbers,
            note="One optimizer step from micro-batches on the host: forward, clipped loss over per-token log-probs, "
            "backward, clipping, AdamW. The plugin's side is its `train` hook through the worker's host, with metrics. "
            "Gradient norms, plugin and bare loop: "
            + "; ".join(f"{a:.5g} and {b:.5g}" for a, b in zip(*self.norms, strict=False))
            + f". {'' if same else DIFFERENT}",
            versions=facts(case, "transformers", "triton"),
        )

    def write(self) -> None:
        if self.output:
            finish(self.report, self.output)


def kernels(device: torch.device, step: Callable[[], object]) -> str:
    """What the device does in one step, the longest first, as a table."""
    activity, on_gpu = torch.profiler.ProfilerActivity, device.type == "cuda"
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profile:
        timed(device, step)
    found: str = profile.key_averages().table(sort_by=by, row_limit=KERNELS, max_name_column_width=80)
    return found


def measure(case: Case, *, rounds: int, output: str | None = None, profile: bool = False) -> Report:
    """In a process group of one. Two rounds warm up, and compile. With `profile`, prints what either side does."""
    device, loss = device_of(case), case.loss(entropy=False)
    plugin = Plugin("fsdp", case, {"compile": case.compile})
    bare = Bare(case, device)
    batch = packed_batch(case, dp_rank=0, dp_size=1)
    found = Found(case=case, output=output)

    def ours(number: int) -> float:
        return timed(device, lambda: found.norms[0].append(plugin.train(batch, loss)), found.peaks, "the plugin")

    def other(number: int) -> float:
        return timed(device, lambda: found.norms[1].append(bare.train(batch)), found.peaks, "the bare loop")

    in_turns(2, ours, other)
    if profile:
        print(f"the plugin\n{kernels(device, lambda: plugin.train(batch, loss))}", flush=True)
        print(f"the bare loop\n{kernels(device, lambda: bare.train(batch))}", flush=True)
    for number in range(rounds):
        mine, its = in_turns(1, ours, other) if number % 2 == 0 else in_turns(1, other, ours)[::-1]
        found.ours += mine
        found.other += its
        found.write()
    plugin.worker.shutdown("measured")
    return found.report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", choices=CASES, default="slice")
    parser.add_argument("--rounds", type=int, default=6, help="measured steps of each side, in turns (default: 6)")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch (default: 16384)")
    parser.add_argument("--micro-batches", type=int, help="of a step (default: 1, with 0.6b 4)")
    parser.add_argument(
        "--recompute", action="store_true", help="layers recomputed for the backward pass, on both sides"
    )
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="train adapters; the other side passes without training"
    )
    parser.add_argument("--eager", action="store_true", help="neither side compiles")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to see that everything runs")
    parser.add_argument("--profile", action="store_true", help="print what the device does in a step of each side")
    parser.add_argument("--output", help="a JSON file, written again after each round; without it a table is printed")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    case = CASES[args.case]
    case = evolve(
        case,
        tokens=args.tokens,
        micro_batches=args.micro_batches or case.micro_batches,
        recompute="full" if args.recompute else "none",
        compile=not args.eager,
        lora=LoraConfig(rank=args.lora).settled({}) if args.lora else None,
    )
    case = case.tiny if args.tiny else case
    join(case)
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    report = measure(case, rounds=args.rounds, output=args.output, profile=args.profile)
    finish(report, None)
    dist.destroy_process_group()
    if DIFFERENT in report.note:
        sys.exit(DIFFERENT)


if __name__ == "__main__":
    main()
