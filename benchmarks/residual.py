"""Measure the GPU memory that a sleeping rank holds in addition to the CUDA context: each backend, after real steps.

python -m benchmarks.residual fsdp megatron deepspeed-stage3 --output found/residual.json
python -m benchmarks.residual fsdp megatron --ranks 2
python -m benchmarks.residual fsdp --tiny

The whole 0.6B shape takes two steps, sleeps, wakes, takes one more and sleeps again. Each case has its own processes,
one per GPU. The context is what the driver reports before anything runs. What is left while everything sleeps is split
into torch's part, held by its allocator, and the rest: loaded kernels, NCCL's buffers, libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, evolve, frozen

from benchmarks.report import Number, Report, finish
from benchmarks.sleep import ALLOWED, KINDS, synchronize, used
from benchmarks.steps import GIB, QWEN3_600M, Plugin, Work, device_of, environment, join, packed_batch, run_ranks

RANK = "--rank"  # how this program starts itself as the ranks of one case
LIMIT = 300.0  # seconds of one case
COUNTED = "by the rank's own count, which on a GPU has the context in it"
STEPS = (2, 1)  # before the first sleep, before the second


@frozen(kw_only=True)
class Case(Work):
    backend: str

    @property
    def tiny(self) -> Case:
        """The same case for the CPU."""
        return evolve(self, **self.on_cpu())


def case(what: str, **options: Any) -> Case:
    """`what` begins with the backend's name."""
    return Case(what=what, backend=what.partition("-")[0], fields=QWEN3_600M, options=options)


CASES = {
    each.what: each
    for each in (
        case("fsdp", compile=False),
        case("fsdp-compiled", compile=True),
        case("fsdp-offload", compile=False, offload="optimizer"),
        case("megatron"),
        case("deepspeed-stage2", stage=2),
        case("deepspeed-stage3", stage=3),
        case("deepspeed-offload", stage=2, offload="optimizer"),
    )
}


NOTE = (
    "Two optimizer steps, `sleep` of all kinds through the worker, `wake_up`, one step, and `sleep` again; each value "
    "is one rank's. The context is the GPU memory that the driver reports before there is a process group or a model."
)


@frozen(kw_only=True)
class Left:
    """Bytes of one rank's device while it sleeps, without the context; on a CPU the backend's own count alone."""

    context: int
    all: int
    torchs: int  # kept by torch's allocator, whether a tensor lies in it or not
    tensors: int  # in tensors
    counted: int  # as the rank itself says, on a GPU with the context


def measure(case: Case) -> list[list[Left]]:
    """[rank][sleep]; called on every rank, in a process that has touched no device."""
    if case.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = device_of(case)
    synchronize(device)
    context = used(device)
    join(case)
    plugin = Plugin(case.backend, case, case.options)
    layout = plugin.layout
    batch = packed_batch(
        case, dp_rank=layout.dp_rank, dp_size=layout.dp_size, sequence_multiple=layout.sequence_multiple
    )
    found = []
    for steps in STEPS:
        for _ in range(steps):
            plugin.train(batch, case.loss(entropy=False))
        told = plugin.worker.sleep(KINDS)
        for note in told.notes:
            print(f"rank {dist.get_rank()}: {note}", file=sys.stderr)
        on_gpu = device.type == "cuda"
        found.append(
            Left(
                context=context,
                all=used(device) - context,
                torchs=torch.cuda.memory_reserved(device) if on_gpu else 0,
                tensors=torch.cuda.memory_allocated(device) if on_gpu else 0,
                counted=told.residual_bytes,
            )
        )
        plugin.worker.wake_up(KINDS)
    ranks = [found] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    plugin.worker.shutdown("measured")
    return ranks


def numbers_of(ranks: Sequence[Sequence[Left]], *, name: str, tiny: bool) -> list[Number]:
    def gib(what: str, number: int, field: str, target: float | None = None) -> Number:
        values = [getattr(rank[number], field) / GIB for rank in ranks]
        return Number(what=f"{name}: {what}", values=values, unit="GiB", target=target)

    target = None if tiny else ALLOWED
    return [
        gib("the context", 0, "context"),
        gib("besides the context, asleep", 0, "all", target),
        gib("the same after one more step", 1, "all", target),
        gib("of that, held by torch's allocator", 1, "torchs"),
        gib("of that, in tensors", 1, "tensors"),
        gib(COUNTED, 1, "counted"),
    ]


def ranks_of(case: Case) -> list[list[Left]]:
    """Start one case's processes. Raises RuntimeError where they fail or are not done after LIMIT seconds."""
    ranks = str(case.ranks)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if case.ranks > 1 else []
    flags = [flag for flag, wanted in (("--tiny", case.device == "cpu"),) if wanted]
    with tempfile.TemporaryDirectory(prefix="residual-") as directory:
        file = Path(directory) / "left.json"
        command = [sys.executable, *torchrun, "-m", "benchmarks.residual", case.what, *flags, RANK, str(file)]
        if why := run_ranks(command, more=environment(case.backend, case, case.options), limit=LIMIT):
            raise RuntimeError(why)
        return [[Left(**each) for each in rank] for rank in json.loads(file.read_text())]


def main() -> int:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    command.add_argument("--ranks", type=int, default=1, help="GPUs of each case (default: 1)")
    command.add_argument("--tiny", action="store_true", help="a small model on the CPU, to see that everything runs")
    command.add_argument("--output", help="a JSON file, written again after each case; without it tables are printed")
    command.add_argument(RANK, metavar="FILE", help=argparse.SUPPRESS)
    args = command.parse_args()
    cases = [evolve(CASES[name].tiny if args.tiny else CASES[name], ranks=args.ranks) for name in args.cases]
    if args.rank:
        return as_rank(cases[0], Path(args.rank))
    numbers: list[Number] = []
    failed = []
    for each in cases:
        try:
            numbers += numbers_of(ranks_of(each), name=each.what, tiny=args.tiny)
        except RuntimeError as error:
            failed.append(f"{each.what}: {error}")
            continue
        size = f"{'a tiny model' if args.tiny else '0.6B shape'}, {args.ranks} ranks of each"
        report = Report(name="residual", size=size, numbers=numbers, note=NOTE)
        if args.output:
            finish(report, args.output)
    if numbers:
        finish(report, None)
    if failed:
        sys.exit("; ".join(failed))
    return 0


def as_rank(case: Case, file: Path) -> int:
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it
    warnings.filterwarnings("ignore", category=FutureWarning)  # of names that DeepSpeed calls and torch will change
    ranks = measure(case)
    if dist.get_rank() == 0:
        file.write_text(json.dumps([[asdict(left) for left in rank] for rank in ranks]))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
