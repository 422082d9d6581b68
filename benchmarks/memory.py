"""Measure what a rank takes on a GPU in a step, in a pass without gradients, and asleep, against what was predicted.

python -m benchmarks.memory --output found/memory.json
python -m benchmarks.memory fsdp fsdp-recompute
python -m benchmarks.memory --tiny

Each case is a process of its own, or as many as it has ranks: it builds the backend, takes three steps, and sends one
step's micro-batches through a pass without gradients. Measured is the most that torch has allocated on any rank,
predicted is `corerl_forecast.footprint`. Then the rank sleeps, wakes, takes one more step and sleeps again: what it
holds asleep, besides the CUDA context before there was a process group or a model, must not exceed half a GiB. With
--tiny, nothing is measured: predictions are made, and steps run on a CPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from transformers import AutoConfig

from benchmarks import shapes
from benchmarks.report import arguments
from benchmarks.steps import (
    GIB,
    Plugin,
    Work,
    allocated,
    device_of,
    facts,
    in_ranks,
    join,
    synchronize,
    train_config,
    used,
)
from corerl.config.schema import ClusterInfo
from corerl.config.structuring import structure
from corerl.models.files import meta_model
from corerl.plugin.registry import Kind, load
from corerl.types import MemoryKind, Output
from corerl_forecast.footprint import RoleMemory, role_memory

STEPS = 3  # the first one makes the moments
LIMIT = 240.0  # seconds for a case
ALLOWED = 0.5  # GiB asleep, besides the context
EXPERTS = {**shapes.QWEN3_30B_A3B, "num_hidden_layers": 4}
BY_LAYER = {"reshard_after_forward": True}  # the least memory, whatever the model's size
KEPT = {"compile": False}  # models of at most 4 GiB stay gathered by default
EAGER = {**BY_LAYER, "compile": False}
ON_HOST = {"stage": 2, "offload": "optimizer"}


def case(what: str, fields: Mapping[str, Any], backend: str = "fsdp", **more: Any) -> Work:
    return Work(what=what, fields=fields, backend=backend, **{"options": EAGER if backend == "fsdp" else {}, **more})


SLICED = case("8 layers of the 8B shape", shapes.SLICE)
COMPILED = case("8 layers of the 8B shape, compiled", shapes.SLICE, options={**BY_LAYER, "compile": True})
STAGE_2 = case("8 layers of the 8B shape, stage 2", shapes.SLICE, "deepspeed", options={"stage": 2})
STAGE_3 = case("8 layers of the 8B shape, stage 3", shapes.SLICE, "deepspeed", options={"stage": 3})
MEGATRON = case("8 layers of the 8B shape", shapes.SLICE, "megatron")
WHOLE = evolve(SLICED, what="8 layers of the 8B shape, whole", layout="whole")


def recomputed(work: Work) -> Work:
    return evolve(work, what=f"{work.what}, layers recomputed", recompute="full")


LONG = case("the 0.6B shape, sequences of 32k", shapes.QWEN3_600M, sequence=32768, tokens=32768)
CASES: Mapping[str, Work] = {
    "fsdp": SLICED,
    "fsdp-compiled": COMPILED,
    "fsdp-single": evolve(COMPILED, what=f"{COMPILED.what}, one micro-batch", tokens=16384, micro_batches=1),
    "fsdp-recompute": recomputed(SLICED),
    "fsdp-0.6b": case("the 0.6B shape, sequences of 512", shapes.QWEN3_600M, sequence=512),
    "fsdp-0.6b-kept": case("the 0.6B shape, weights kept gathered", shapes.QWEN3_600M, sequence=512, options=KEPT),
    "fsdp-0.6b-compiled": case("the 0.6B shape, by default", shapes.QWEN3_600M, sequence=512, options={}),
    "fsdp-gemma3-kept": case("Gemma 3 1B, weights kept gathered", shapes.GEMMA3_1B, options=KEPT),
    "fsdp-long": recomputed(LONG),
    "fsdp-gemma3": case("Gemma 3 1B", shapes.GEMMA3_1B),
    "fsdp-qwen3.5": case("8 layers of Qwen3.5 0.8B", shapes.QWEN3_5_SLICE),
    "fsdp-gpt-oss": case("8 layers of GPT-OSS, 8 experts", shapes.GPT_OSS_SLICE, tokens=4096),
    "fsdp-whole": WHOLE,
    "fsdp-whole-recompute": recomputed(WHOLE),
    "fsdp-bloom": case("BLOOM 1B1, whole", shapes.BLOOM_1B1, layout="whole"),
    "fsdp-experts": case("4 layers of the 30B-A3B shape", EXPERTS),
    "fsdp-offload": evolve(
        SLICED, what=f"{SLICED.what}, optimizer on the host", options={**EAGER, "offload": "optimizer"}
    ),
    "fsdp-2": recomputed(case("8B shape", shapes.QWEN3_8B, ranks=2)),
    "deepspeed-1": case("0.6B shape, stage 1", shapes.QWEN3_600M, "deepspeed", options={"stage": 1}),
    "deepspeed-2": STAGE_2,
    "deepspeed-whole": evolve(STAGE_2, what=f"{STAGE_2.what}, whole", layout="whole"),
    "deepspeed-3": STAGE_3,
    "deepspeed-3-recompute": recomputed(STAGE_3),
    "deepspeed-offload": case(
        "the 0.6B shape, stage 2, optimizer on the host", shapes.QWEN3_600M, "deepspeed", options=ON_HOST
    ),
    "megatron": MEGATRON,
    "megatron-recompute": recomputed(MEGATRON),
    "megatron-torch": recomputed(
        evolve(MEGATRON, what=f"{SLICED.what}, plain torch", options={"transformer": "torch"})
    ),
    "megatron-experts": case("4 layers of the 30B-A3B shape", EXPERTS, "megatron"),
}


def predicted(work: Work) -> RoleMemory:
    spec = load(Kind.BACKENDS, work.backend).spec
    config = AutoConfig.for_model(**work.fields)
    found = role_memory(
        spec,
        structure(dict(work.options), spec.config, path=f"backends.{work.backend}"),
        ClusterInfo(device="cuda", ranks=work.ranks, model=work.fields, train=train_config(work)),
        config,
        meta_model(config),
        outputs=(Output.LOGPROBS,),
        longest=work.sequence,
        single=work.micro_batches == 1,
    )
    assert found is not None  # all backends here can tell
    return found


def measure(work: Work) -> tuple[dict[str, int], dict[str, str]]:
    """Called on every rank. The most bytes of any rank, by what they are for, and versions."""
    if work.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = device_of(work)
    synchronize(device)
    context = used(device)
    join(work)
    plugin = Plugin(work)
    batch = plugin.batch
    for _ in range(STEPS - 1):
        plugin.train(batch)
    _forget_peak(device)
    plugin.train(batch)
    step = _peak(device)
    before = allocated(device)
    _forget_peak(device, empty=False)
    plugin.worker.host.forward(batch=batch, outputs=(Output.LOGPROBS,), snapshot="")
    forward = _peak(device) - before
    asleep = []
    for again in (False, True):
        if again:
            plugin.train(batch)
        for note in plugin.worker.sleep(frozenset(MemoryKind)).notes:
            print(f"rank {dist.get_rank()}: {note}", file=sys.stderr)
        asleep.append(used(device) - context)
        kept = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        plugin.worker.wake_up(frozenset(MemoryKind))
    plugin.close()
    found = {"measured": step, "measured_forward": forward, "context": context, "asleep": asleep[0]}
    found |= {"asleep_again": asleep[1], "kept_by_torch": kept}
    ranks = [found] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    return {name: max(rank[name] for rank in ranks) for name in found}, facts(work, "transformers")


def _forget_peak(device: torch.device, *, empty: bool = True) -> None:
    if device.type == "cuda":
        if empty:
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def row_of(name: str, measured: Mapping[str, int]) -> dict[str, Any]:
    """Bytes; what is measured is 0 on a CPU, and predictions are of the whole model there too."""
    work = CASES[name]
    memory = predicted(work)
    return {
        "name": name,
        "backend": work.backend,
        "what": work.what,
        "tokens": work.tokens,
        "ranks": work.ranks,
        "predicted": memory.training,
        "predicted_forward": memory.rank.gathered + memory.forward,
        **measured,
        "parts": {
            **{kind.value: memory.rank.kinds.get(kind, 0) for kind in MemoryKind},
            "gathered": memory.rank.gathered,
            "reducing": memory.rank.reducing,
            "activations": memory.train,
        },
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all of one rank)")
    parser.add_argument("--ranks", type=int, help="of each case, in place of its own")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for name in args.cases or [name for name, work in CASES.items() if work.ranks == 1]:
        work = CASES[name].tiny if args.tiny else CASES[name]
        work = evolve(work, ranks=args.ranks or work.ranks)
        try:
            measured, versions = in_ranks("benchmarks.memory:measure", work, work=work, limit=LIMIT)
        except RuntimeError as error:
            failures.append(f"{name}: {error}")
            print(failures[-1], flush=True)
            continue
        rows.append(row_of(name, measured))
        print(name, {each: f"{rows[-1][each] / GIB:.2f} GiB" for each in ("predicted", "predicted_forward", *measured)})
        if args.output:
            found = {"versions": versions, "rows": rows, "failures": failures}
            Path(args.output).parent.mkdir(parents=True, exist_ok=True)
            Path(args.output).write_text(json.dumps(found, indent=1))
    most = {row["name"]: max(row["asleep"], row["asleep_again"]) / GIB for row in rows}
    failures += [f"{name} holds {gib:.2f} GiB asleep, allowed {ALLOWED}" for name, gib in most.items() if gib > ALLOWED]
    if failures:
        sys.exit("; ".join(failures))


if __name__ == "__main__":
    main()
