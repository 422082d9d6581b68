"""Measure what slow paths cost: a training step on each, and on the same work without it, on one GPU.

python -m benchmarks.slow_paths --output found
python -m benchmarks.slow_paths smollm2 profile --output found
python -m benchmarks.slow_paths --tiny --output found

Pieces, each a group of sides of which the first is what the others are divided by:

- `smollm2`, `0.6b`: 512 samples of 100 to 200 tokens on the SmolLM2-135M shape, and 16k tokens of such on the 0.6B
  shape, in micro-batches of 16k: FSDP with compiled layers and without, and Megatron in plain torch, once as it is and
  once with megatron-core's own rotary embedding, which turns one sequence after the other.
- `profile`: what Megatron does in such a step of the SmolLM2-135M shape, and how often it and FSDP launch a kernel.
- `float32`: the same step on FSDP in float32, with layers as they are ("auto") and compiled.
- `heads`: 8 layers of equal width with heads of 320 instead of 128 elements, as they are and compiled around attention.
- `sinks`, `caps`: 8 layers of the 0.6B shape, of which each has sinks or capped scores besides, not compiled.

`found/slow_paths.json` and `.md` are written again after each side, so that a run which is cut off leaves what it
found. A side that fails is reported, and the next one is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from attrs import asdict, define, evolve, field, frozen
from torch import Tensor

from benchmarks.samples import make_batch, plan_one_step
from benchmarks.steps import COMMON, GIB, QWEN3_600M, TINY, Plugin, Work, device_of, environment, facts, join, timed
from corerl.data.packing import pack
from corerl.models import attention
from corerl.ops import PackedSequences, packed_attention
from corerl.types import IntArray, PackedBatch

SMOLLM2_135M = {
    **COMMON,
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
EIGHT_LAYERS = {**QWEN3_600M, "num_hidden_layers": 8}
NARROW = {**EIGHT_LAYERS, "num_attention_heads": 20, "num_key_value_heads": 10, "head_dim": 128}
WIDE = {**EIGHT_LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 320}
TOKENS = 16384
ROWS = 25  # of a profile's tables
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
TOLERANCE = 5e-2  # of first gradient norms in bfloat16, between sides that do the same work
SINK = 0.0  # the score of every head's
CAP = 50.0  # of scores, as Gemma 2 has it


@frozen(kw_only=True)
class Case(Work):
    lengths: tuple[int, ...]  # of the samples of a step

    def samples(self, dp_size: int) -> IntArray:
        return np.array(self.lengths)

    @property
    def tiny(self) -> Case:
        """The same for a CPU, with as many samples in a micro-batch."""
        small = {**self.fields, **TINY}
        if self.fields["head_dim"] > 128:
            small |= {"head_dim": 320, "num_hidden_layers": 1}
        lengths = tuple(max(2, length // 16) for length in self.lengths[:40])
        return evolve(self, fields=small, lengths=lengths, tokens=max(sum(lengths) // 2, *lengths), device="cpu")


@frozen(kw_only=True)
class Side:
    name: str
    case: Case
    backend: str = "fsdp"
    options: Mapping[str, Any] = field(factory=dict)
    changed: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # around its steps
    same: bool = True  # whether it computes what the first side of its piece does
    rounds: int = 0  # measured steps; 0: as many as the command says
    slow: bool = False  # a single step warms it up


@define
class Found:
    """What was measured so far."""

    directory: Path
    facts: Mapping[str, str]
    sides: dict[str, dict[str, dict[str, Any]]] = field(factory=dict)  # piece -> side -> numbers
    failed: dict[str, str] = field(factory=dict)
    notes: list[str] = field(factory=list)

    def write(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "slow_paths.json").write_text(json.dumps(asdict(self), default=str, indent=1))
        (self.directory / "slow_paths.md").write_text(self.text)

    @property
    def text(self) -> str:
        lines = [", ".join(f"{name} {value}" for name, value in self.facts.items())]
        for piece, sides in self.sides.items():
            lines += ["", f"## {piece}", "", "| side | a step, median (min to max) | ratio | peak | gradient norm |"]
            lines += ["|---|---|---|---|---|"]
            base = statistics.median(next(iter(sides.values()))["seconds"])
            for side, found in sides.items():
                seconds, middle = found["seconds"], statistics.median(found["seconds"])
                lines.append(
                    f"| {side} | {middle * 1e3:.0f} ms ({min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f}) | "
                    f"**{middle / base:.2f}** | {found['peak_gib']:.1f} GiB | {found['norms'][0]:.5g} |"
                )
        lines += ["", *self.notes]
        lines += [f"FAILED: {name}\n\n```\n{why}\n```" for name, why in self.failed.items()]
        return "\n".join(lines) + "\n"


# ---- what is measured ------------------------------------------------------------------------------------------------


def short_samples(samples: int) -> tuple[int, ...]:
    return tuple(int(each) for each in np.random.default_rng(0).integers(100, 201, samples))


def work(what: str, fields: Mapping[str, Any], lengths: tuple[int, ...], precision: str = "bfloat16") -> Case:
    return Case(what=what, fields=fields, lengths=lengths, tokens=TOKENS, precision=precision)


SMOLLM2 = work("SmolLM2-135M, 512 samples", SMOLLM2_135M, short_samples(512))
QWEN3 = work("0.6B, 16k tokens", QWEN3_600M, short_samples(108))
EIGHT = work("8 layers of the 0.6B shape, 16k tokens", EIGHT_LAYERS, (512,) * 32)


@contextmanager
def by_sequence() -> Iterator[None]:
    """megatron-core's rotary embedding as it is without the plugin."""
    from megatron.core.models.common.embeddings import rope_utils

    from corerl_megatron.rotary import BY_SEQUENCE

    with mock.patch.object(rope_utils, "_apply_rotary_pos_emb_thd", BY_SEQUENCE):
        yield


@contextmanager
def attending(**more: float) -> Iterator[None]:
    """Attention that has this besides."""

    def changed(q: Tensor, k: Tensor, v: Tensor, packing: PackedSequences, *args: Any, **options: Any) -> Tensor:
        options["softcap"] = more.get("softcap")
        options["sinks"] = torch.full_like(q[0, :, 0], more["sink"]) if "sink" in more else None
        return packed_attention(q, k, v, packing, *args, **options)

    with mock.patch.object(attention, "packed_attention", changed):
        yield


def backends_on(case: Case) -> list[Side]:
    torch_layers = {"transformer": "torch"}
    return [
        Side(name="FSDP, compiled", case=case, options={"compile": True}),
        Side(name="FSDP", case=case, options={"compile": False}),
        Side(name="Megatron in plain torch", case=case, backend="megatron", options=torch_layers),
        Side(
            name="Megatron in plain torch, one sequence after the other",
            case=case,
            backend="megatron",
            options=torch_layers,
            changed=by_sequence,
            rounds=2,
            slow=True,
        ),
    ]


def precisions(case: Case) -> list[Side]:
    precise = evolve(case, precision="float32")
    return [
        Side(name="bfloat16, compiled", case=case, options={"compile": True}),
        Side(name="float32, as `auto` has it", case=precise, options={"compile": False}, rounds=3, slow=True),
        Side(name="float32, compiled around attention", case=precise, options={"compile": True}, rounds=3, slow=True),
    ]


def heads() -> list[Side]:
    narrow, wide = evolve(EIGHT, fields=NARROW), evolve(EIGHT, fields=WIDE)
    return [
        Side(name="20 heads of 128", case=narrow, options={"compile": False}),
        Side(name="20 heads of 128, compiled", case=narrow, options={"compile": True}),
        Side(name="8 heads of 320", case=wide, options={"compile": False}, same=False),
        Side(name="8 heads of 320, compiled around attention", case=wide, options={"compile": True}, same=False),
    ]


def with_and_without(name: str, **more: float) -> list[Side]:
    plain = Side(name="without", case=EIGHT, options={"compile": False})
    changed = partial(attending, **more)
    return [plain, evolve(plain, name=name, changed=changed, same=False, rounds=4)]


PIECES: Mapping[str, Callable[[], list[Side]]] = {
    "smollm2": lambda: backends_on(SMOLLM2),
    "0.6b": lambda: backends_on(QWEN3),
    "float32": lambda: precisions(SMOLLM2),
    "heads": heads,
    "sinks": lambda: with_and_without("with sinks", sink=SINK),
    "caps": lambda: with_and_without("with capped scores", softcap=CAP),
}
PROFILE = "profile"


# ---- how -------------------------------------------------------------------------------------------------------------


def batch_of(case: Case, *, micro_batches: int | None = None) -> PackedBatch:
    samples = make_batch(case.samples(1), prompt=max(1, min(case.lengths) // 8), vocab=case.fields["vocab_size"])
    plan = plan_one_step(samples, dp_size=1, tokens_per_micro_batch=case.tokens)
    batch = pack(samples, plan.share(0), sequence_multiple=1)
    kept = list(batch.micro_batches)[:micro_batches]
    return evolve(batch, micro_batches=kept, count=len(kept))


@contextmanager
def started(side: Side) -> Iterator[Plugin]:
    """A rank that ends, and leaves its memory to the next one."""
    plugin = Plugin(side.backend, side.case, side.options)
    try:
        yield plugin
    finally:
        plugin.worker.shutdown("measured")
        del plugin
        torch._dynamo.reset()
        gc.collect()
        if side.case.device == "cuda":
            torch.cuda.empty_cache()


def measure(side: Side, *, rounds: int) -> dict[str, Any]:
    device, loss, batch = device_of(side.case), side.case.loss(entropy=False), batch_of(side.case)
    norms: list[float] = []
    peaks: dict[str, float] = {}
    began = time.perf_counter()
    with started(side) as plugin, side.changed():

        def step() -> None:
            norms.append(plugin.train(batch, loss))

        warm = [timed(device, step) for _ in range(1 if side.slow else 2)]
        seconds = [timed(device, step, peaks, "it") for _ in range(side.rounds or rounds)]
    return {
        "seconds": seconds,
        "warm": warm,  # seconds of the steps before, the first of which compiles
        "norms": norms,
        "peak_gib": peaks.get("it", 0.0) / GIB,
        "tokens": int(sum(side.case.lengths)),
        "micro_batches": batch.count,
        "whole": time.perf_counter() - began,
    }


def unlike(sides: Sequence[Side], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sides whose first gradient is not that of the first side, though they do the same work."""
    norm = next(iter(found.values()))["norms"][0]
    return [
        f"THE FIRST GRADIENTS DIFFER: {side.name} has {found[side.name]['norms'][0]:.5g}, the first side {norm:.5g}"
        for side in sides
        if side.same and side.name in found and not np.isclose(found[side.name]["norms"][0], norm, rtol=TOLERANCE)
    ]


def profiled(side: Side, *, micro_batches: int | None = None, tables: bool = False) -> tuple[dict[str, Any], str]:
    """What one step does: launched kernels, seconds in which the GPU was busy; and with `tables` the longest."""
    device, loss = device_of(side.case), side.case.loss(entropy=False)
    batch = batch_of(side.case, micro_batches=micro_batches)
    activity, on_gpu = torch.profiler.ProfilerActivity, device.type == "cuda"
    activities = [activity.CUDA] if on_gpu and not tables else [activity.CPU, *([activity.CUDA] if on_gpu else [])]
    with started(side) as plugin, side.changed():
        for _ in range(1 if side.slow else 2):
            plugin.train(batch, loss)
        unwatched = timed(device, lambda: plugin.train(batch, loss))
        with torch.profiler.profile(activities=activities) as profile:
            watched = timed(device, lambda: plugin.train(batch, loss))
    averages = profile.key_averages()
    launched = sum(each.count for each in averages if each.key in LAUNCHES)
    busy = sum(each.self_device_time_total for each in averages if each.device_type == torch.autograd.DeviceType.CUDA)
    found = {
        "micro_batches": batch.count,
        "launches": launched,
        "operators": sum(each.count for each in averages if each.key.startswith("aten::")),
        "seconds": unwatched,
        "seconds_watched": watched,
        "gpu_busy_seconds": busy / 1e6,
        "gpu_busy_share": busy / 1e6 / unwatched,
    }
    text = ""
    if tables:
        orders = (["self_device_time_total"] if on_gpu else []) + ["self_cpu_time_total"]
        shown = partial(averages.table, row_limit=ROWS, max_name_column_width=70)
        text = "\n\n".join(f"by {order}\n\n{shown(sort_by=order)}" for order in orders)
    return found, text


def profile_all(found: Found, tried: Callable[[str, Callable[[], None]], None], *, tiny: bool) -> None:
    names = ("FSDP, compiled", "FSDP", "Megatron in plain torch")
    sides = {side.name: fitted(side, tiny=tiny) for side in backends_on(SMOLLM2)}
    for name in reversed(names):

        def whole(name: str = name) -> None:
            tables = name.startswith("Megatron")
            numbers, text = profiled(sides[name], tables=tables)
            found.notes.append(f"- profile of a step, {name}: {_listed(numbers)}")
            if tables:
                (found.directory / "profile_megatron.txt").write_text(f"{numbers}\n\n{text}\n")

        tried(f"profile of {name}", whole)
    for name, side in sides.items():
        if name.startswith("Megatron"):

            def one(name: str = name, side: Side = side) -> None:
                numbers, _ = profiled(side, micro_batches=1)
                found.notes.append(f"- profile of a single micro-batch, {name}: {_listed(numbers)}")

            tried(f"profile of a micro-batch of {name}", one)


def _listed(numbers: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def fitted(side: Side, *, tiny: bool) -> Side:
    """On a CPU nothing is compiled: that takes a minute, and says nothing."""
    if not tiny:
        return side
    options = {**side.options, "compile": False} if "compile" in side.options else side.options
    return evolve(side, case=side.case.tiny, options=options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*PIECES, PROFILE]
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"{', '.join(names)}; without any, all")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each side (default: 5)")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("found"), help="a directory (default: found)")
    args = parser.parse_args()
    if unknown := set(args.pieces) - set(names):
        parser.error(f"no piece {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    first = fitted(PIECES["smollm2"]()[0], tiny=args.tiny).case
    os.environ.update(environment("megatron", first, {"transformer": "torch"}))
    join(first)
    versions = facts(first, "transformers", "megatron-core", "transformer_engine", "triton")
    found = Found(directory=args.output, facts=versions)

    def tried(name: str, call: Callable[[], None]) -> None:
        began = time.perf_counter()
        try:
            call()
        except Exception:  # of whatever library: the others are still worth measuring
            found.failed[name] = traceback.format_exc()
        found.write()
        print(f"{name}: {time.perf_counter() - began:.0f} s{' FAILED' if name in found.failed else ''}", flush=True)

    for piece in args.pieces or names:
        if piece == PROFILE:
            profile_all(found, tried, tiny=args.tiny)
            continue
        sides = [fitted(side, tiny=args.tiny) for side in PIECES[piece]()]
        for side in sides:

            def one(piece: str = piece, side: Side = side) -> None:
                found.sides.setdefault(piece, {})[side.name] = measure(side, rounds=args.rounds)

            tried(f"{piece}, {side.name}", one)
        if found.sides.get(piece):
            found.notes += [f"- {piece}: {line}" for line in unlike(sides, found.sides[piece])]
            found.write()
    print(found.text)
    dist.destroy_process_group()
    if found.failed or any("DIFFER" in note for note in found.notes):
        sys.exit(1)


if __name__ == "__main__":
    main()
