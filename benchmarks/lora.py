"""What merging adapters costs an update: the same update with and without it, in one process on one GPU.

python -m benchmarks.lora --output found/lora.json
python -m benchmarks.lora --tiny

The actor is 8 layers of the Qwen3-8B shape in bfloat16 on the FSDP backend, with adapters of rank 32 on all linear
layers. An update gathers each bucket and copies it to memory of its own on the device, as over CUDA IPC; one side adds
scale B A to each weight in float32 before, the other sends the weights as they are, as a run without adapters does. The
training step with adapters is `python -m benchmarks.fsdp_gpu --lora 32`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from unittest import mock

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor

from benchmarks.report import Comparison, Number, Report, finish, in_turns
from benchmarks.steps import GIB, SLICE, Plugin, Work, device_of, facts, join, timed
from corerl.config.schema import LoraConfig
from corerl.testing.inprocess import InProcessSender
from corerl.weights.adapters import is_adapter

LIMIT = 1.5  # times an update without adapters
RANK = 32


def measure(work: Work, *, rounds: int) -> Report:
    """In a process group of one. Two rounds warm up."""
    device = device_of(work)
    plugin = Plugin("fsdp", work, {})
    backend = plugin.worker.backend
    held: dict[str, Tensor] = {}

    def take(bucket: Mapping[str, Tensor]) -> None:
        for name, tensor in bucket.items():
            held.setdefault(name, torch.empty_like(tensor)).copy_(tensor)

    versions = iter(range(1, 1000))

    def update(number: int) -> float:
        sender = InProcessSender(take)
        return timed(device, lambda: plugin.worker.host.update_weights(sender, next(versions)))

    def without(number: int) -> float:
        with mock.patch.object(backend, "_merged", ()):
            return update(number)

    in_turns(2, update, without)
    merged, plain = in_turns(rounds, update, without)
    adapters = sum(chunk.view.numel() for chunk in backend.weights if is_adapter(chunk.name))
    sent = sum(tensor.nbytes for tensor in held.values())
    plugin.worker.shutdown("measured")
    return Report(
        name="lora",
        size=f"{work.what}, adapters of rank {RANK}",
        comparisons=[
            Comparison(
                what="an update with the adapters merged",
                against="the same update without them",
                ours=merged,
                other=plain,
                target=LIMIT,
            )
        ],
        numbers=[
            Number(what="sent", values=[sent / GIB], unit="GiB"),
            Number(what="adapters", values=[adapters / 1e6], unit="million elements"),
        ],
        note="The sum is made in float32 for each weight, and rounded once to what is sent.",
        versions=facts(work),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="measured updates of each side, in turns (default: 10)")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to see that everything runs")
    parser.add_argument("--output", help="a JSON file; without it a table is printed")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    lora = LoraConfig(rank=RANK).settled({})
    work = Work(what="8 layers of the 8B shape", fields=SLICE, lora=lora)
    work = evolve(work, **work.on_cpu()) if args.tiny else work
    join(work)
    finish(measure(work, rounds=args.rounds), args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
