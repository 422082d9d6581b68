"""Measure what a rank takes on a GPU in a step and in a pass without gradients, beside what was predicted of it.

python -m benchmarks.memory --output found/memory.json
python -m benchmarks.memory fsdp fsdp-recompute
python -m benchmarks.memory --tiny

Each case is a process of its own, or as many as it has ranks: it builds the backend, takes three steps, and sends one
step's micro-batches through a pass without gradients. Measured is the most that torch has allocated on any rank,
predicted is `corerl_forecast.footprint`. With --tiny, nothing is measured: predictions are made, and steps run on a
CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, evolve, frozen
from transformers import AutoConfig

from benchmarks.layouts import CASES as LAYOUTS
from benchmarks.megatron import QWEN3_30B_A3B
from benchmarks.steps import (
    GIB,
    QWEN3_8B,
    QWEN3_600M,
    SLICE,
    Plugin,
    Work,
    device_of,
    environment,
    facts,
    join,
    packed_batch,
    run_ranks,
)
from corerl.config.schema import ClusterInfo, TrainConfig
from corerl.config.structuring import structure
from corerl.models.files import look_at
from corerl.plugin.registry import Kind, load
from corerl.types import MemoryKind, Output
from corerl_forecast.footprint import RoleMemory, role_memory

STEPS = 3  # the first one makes the moments
LIMIT = 240.0  # seconds for a case

BLOOM_1B1 = {  # positions in its attention, which therefore is its own
    "model_type": "bloom",
    "vocab_size": 250880,
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
EXPERTS = {**QWEN3_30B_A3B, "num_hidden_layers": 4}


@frozen(kw_only=True)
class Case(Work):
    backend: str = "fsdp"

    @property
    def tiny(self) -> Case:
        options = {name: value for name, value in self.options.items() if name not in ("compile", "transformer")}
        options |= {"transformer": "torch"} if self.backend == "megatron" else {}
        fields = self.fields if "layer_types" not in self.fields else {}
        small = evolve(self, fields=fields or SLICE)
        return evolve(self, **small.on_cpu(), options=options)


def _of(name: str) -> Mapping[str, Any]:
    return LAYOUTS[name].fields


EAGER = {"compile": False}
CASES = {
    "fsdp": Case(what="8 layers of the 8B shape", fields=SLICE, options=EAGER),
    "fsdp-compiled": Case(what="the same, compiled", fields=SLICE, options={"compile": True}),
    "fsdp-single": Case(
        what="the same, compiled, one micro-batch",
        fields=SLICE,
        options={"compile": True},
        tokens=16384,
        micro_batches=1,
    ),
    "fsdp-recompute": Case(
        what="8 layers of the 8B shape, layers recomputed", fields=SLICE, recompute="full", options=EAGER
    ),
    "fsdp-0.6b": Case(what="the 0.6B shape, sequences of 512", fields=QWEN3_600M, sequence=512, options=EAGER),
    "fsdp-long": Case(
        what="the 0.6B shape, sequences of 32k, layers recomputed",
        fields=QWEN3_600M,
        sequence=32768,
        tokens=32768,
        recompute="full",
        options=EAGER,
    ),
    "fsdp-gemma3": Case(what="Gemma 3 1B", fields=_of("gemma3"), options=EAGER),
    "fsdp-qwen3.5": Case(what="8 layers of Qwen3.5 0.8B", fields=_of("qwen3_5"), options=EAGER),
    "fsdp-gpt-oss": Case(what="8 layers of GPT-OSS, 8 experts", fields=_of("gpt_oss"), tokens=4096, options=EAGER),
    "fsdp-whole": Case(what="8 layers of the 8B shape, whole", fields=SLICE, layout="whole", options=EAGER),
    "fsdp-whole-recompute": Case(
        what="8 layers of the 8B shape, whole, layers recomputed",
        fields=SLICE,
        layout="whole",
        recompute="full",
        options=EAGER,
    ),
    "fsdp-bloom": Case(what="BLOOM 1B1, whole", fields=BLOOM_1B1, layout="whole", options=EAGER),
    "fsdp-experts": Case(what="4 layers of the 30B-A3B shape", fields=EXPERTS, options=EAGER),
    "fsdp-offload": Case(
        what="8 layers of the 8B shape, optimizer on the host", fields=SLICE, options={**EAGER, "offload": "optimizer"}
    ),
    "fsdp-2": Case(what="8B shape, recomputed", fields=QWEN3_8B, ranks=2, recompute="full", options=EAGER),
    "deepspeed-1": Case(backend="deepspeed", what="0.6B shape, stage 1", fields=QWEN3_600M, options={"stage": 1}),
    "deepspeed-2": Case(
        backend="deepspeed",
        what="8 layers of the 8B shape, stage 2",
        fields=SLICE,
        options={"stage": 2},
    ),
    "deepspeed-whole": Case(
        backend="deepspeed",
        what="8 layers of the 8B shape, stage 2, whole",
        fields=SLICE,
        options={"stage": 2},
        layout="whole",
    ),
    "deepspeed-3": Case(
        backend="deepspeed",
        what="8 layers of the 8B shape, stage 3",
        fields=SLICE,
        options={"stage": 3},
    ),
    "deepspeed-3-recompute": Case(
        backend="deepspeed",
        what="8 layers of the 8B shape, stage 3, layers recomputed",
        fields=SLICE,
        options={"stage": 3},
        recompute="full",
    ),
    "deepspeed-offload": Case(
        backend="deepspeed",
        what="the 0.6B shape, stage 2, optimizer on the host",
        fields=QWEN3_600M,
        options={"stage": 2, "offload": "optimizer"},
    ),
    "megatron": Case(backend="megatron", what="8 layers of the 8B shape", fields=SLICE),
    "megatron-recompute": Case(
        backend="megatron", what="8 layers of the 8B shape, layers recomputed", fields=SLICE, recompute="full"
    ),
    "megatron-torch": Case(
        backend="megatron",
        what="8 layers of the 8B shape, plain torch",
        fields=SLICE,
        options={"transformer": "torch"},
        recompute="full",
    ),
    "megatron-experts": Case(backend="megatron", what="4 layers of the 30B-A3B shape", fields=EXPERTS),
}


@frozen(kw_only=True)
class Row:
    """Bytes; measured ones are 0 on a CPU."""

    name: str
    backend: str
    what: str
    tokens: int  # of a micro-batch
    ranks: int
    predicted: int  # in a step
    measured: int
    predicted_forward: int  # in a pass without gradients, beside the weights
    measured_forward: int
    parts: Mapping[str, int]

    @property
    def cells(self) -> list[str]:
        return [
            f"{self.backend}: {self.what}",
            str(self.tokens),
            *_compared(self.predicted, self.measured),
            *_compared(self.predicted_forward, self.measured_forward),
        ]


def _compared(predicted: int, measured: int) -> list[str]:
    ratio = f"**{predicted / measured:.2f}**" if measured else ""
    return [f"{predicted / GIB:.1f}", f"{measured / GIB:.1f}", ratio]


def predicted(case: Case) -> RoleMemory:
    spec = load(Kind.BACKENDS, case.backend).spec
    config = AutoConfig.for_model(**case.fields)
    train = TrainConfig(
        tokens_per_micro_batch=case.tokens,
        precision=case.precision,  # type: ignore[arg-type]  # a name, as of every case
        recompute=case.recompute,  # type: ignore[arg-type]
        layout=case.layout,  # type: ignore[arg-type]
    )
    found = role_memory(
        spec,
        structure(dict(case.options), spec.config, path=f"backends.{case.backend}"),
        ClusterInfo(device="cuda", ranks=case.ranks, model=case.fields, train=train),
        config,
        look_at(config),
        outputs=(Output.LOGPROBS,),
        longest=case.sequence,
        single=case.micro_batches == 1,
    )
    assert found is not None  # all backends here can tell
    return found


def measured(case: Case) -> tuple[int, int]:
    """Bytes of this rank in a step, and in a pass without gradients beyond what was there before. Called on every
    rank."""
    device, loss = device_of(case), case.loss(entropy=False)
    plugin = Plugin(case.backend, case, case.options)
    layout = plugin.layout
    batch = packed_batch(
        case, dp_rank=layout.dp_rank, dp_size=layout.dp_size, sequence_multiple=layout.sequence_multiple
    )
    for _ in range(STEPS - 1):
        plugin.train(batch, loss)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    plugin.train(batch, loss)
    step = torch.cuda.max_memory_allocated() if on_gpu else 0
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    plugin.worker.host.forward(batch=batch, outputs=(Output.LOGPROBS,), weights="")
    forward = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    plugin.worker.shutdown("measured")
    return step, forward


def rank(name: str, *, tiny: bool, output: str) -> None:
    """One rank of a case; the first one writes what was found."""
    case = CASES[name].tiny if tiny else CASES[name]
    join(case)
    step, forward = measured(case)
    most = torch.tensor([step, forward], dtype=torch.float64, device=device_of(case))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{name}: measured {most[0] / GIB:.2f} GiB in a step, {most[1] / GIB:.2f} more in a pass", flush=True)
        memory = predicted(CASES[name])  # on a CPU too: of the whole model
        row = Row(
            name=name,
            backend=case.backend,
            what=case.what,
            tokens=case.tokens,
            ranks=case.ranks,
            predicted=memory.training,
            measured=int(most[0]),
            predicted_forward=memory.rank.gathered + memory.forward,
            measured_forward=int(most[1]),
            parts={
                **{kind.value: memory.rank.kinds.get(kind, 0) for kind in MemoryKind},
                "gathered": memory.rank.gathered,
                "reducing": memory.rank.reducing,
                "activations": memory.train,
            },
        )
        Path(output).write_text(json.dumps({"row": asdict(row), "versions": facts(case, "transformers")}))
    dist.destroy_process_group()


def start(name: str, *, tiny: bool, output: str) -> str:
    """Run a case in processes of its own; says why it failed, "" if it did not."""
    case = CASES[name].tiny if tiny else CASES[name]
    command = [sys.executable]
    if case.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    command += ["-m", "benchmarks.memory", name, "--rank", "--output", output, *(["--tiny"] if tiny else [])]
    return run_ranks(command, more=environment(case.backend, case, case.options), limit=LIMIT)


def print_table(rows: Sequence[Row]) -> None:
    head = ["", "tokens", "step: predicted", "measured", "ratio", "forward: predicted", "measured", "ratio"]
    for cells in (head, ["---"] * len(head), *(row.cells for row in rows)):
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all of one rank)")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to see that everything runs")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", help="a JSON file, written again after each case")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.rank:
        rank(args.cases[0], tiny=args.tiny, output=args.output)
        return
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    rows: list[Row] = []
    failures: list[str] = []
    versions: Mapping[str, str] = {}
    for name in args.cases or [name for name, case in CASES.items() if case.ranks == 1]:
        with tempfile.TemporaryDirectory() as directory:
            output = Path(directory) / "row.json"
            if why := start(name, tiny=args.tiny, output=str(output)):
                failures.append(f"{name}: {why}")
                print(failures[-1], flush=True)
                continue
            found = json.loads(output.read_text())
        rows.append(Row(**found["row"]))
        versions = found["versions"]
        print(" | ".join(rows[-1].cells), flush=True)
        if args.output:
            Path(args.output).parent.mkdir(parents=True, exist_ok=True)
            Path(args.output).write_text(
                json.dumps(
                    {"versions": versions, "rows": [asdict(row) for row in rows], "failures": failures}, indent=1
                )
            )
    print_table(rows)
    if failures:
        sys.exit("; ".join(failures))


if __name__ == "__main__":
    main()
