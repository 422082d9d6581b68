"""Measure one weight update from two FSDP ranks to an engine, as in a run, against a broadcast of as many bytes."""

from __future__ import annotations

import tempfile
import time
from functools import partial

import torch
import torch.distributed as dist
from attrs import evolve

from benchmarks.report import Comparison, Number, Report, finish, in_turns, parser
from corerl.config.schema import Config
from corerl.config.structuring import structure
from corerl.driver.launch import launch
from corerl.driver.run import Run
from corerl.plan.make import make_plan
from corerl_testing.pool import RankPool

RANKS = 2


def config_of(layers: int, bucket_mib: int, run_dir: str) -> Config:
    """A Qwen3 of 26 M parameters and 4.6 M a layer, random weights; nothing is trained or sampled."""
    tables = {
        "run": {"dir": run_dir, "steps": 0},
        "cluster": {"device": "cpu"},
        "backend": {"name": "fsdp"},
        "roles": {"actor": {"ranks": RANKS}},
        "model": {
            "tokenizer": "characters:0123456789>s",
            "config": {
                "model_type": "qwen3",
                "vocab_size": 40000,
                "hidden_size": 640,
                "intermediate_size": 1792,
                "num_hidden_layers": layers,
                "num_attention_heads": 10,
                "num_key_value_heads": 5,
                "head_dim": 64,
                "tie_word_embeddings": True,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
            },
        },
        "weights": {"transport": "collective", "bucket_bytes": bucket_mib * 2**20, "verify_every": 0},
        "checkpoint": {"background": False},
        "extensions": [],
    }
    config: Config = structure(tables, Config, path="")
    return evolve(config)


def update(run: Run) -> float:
    """Seconds of one update. The loop would send nothing where weights have not changed."""
    assert run.updates is not None
    began = time.perf_counter()
    run.updates.push(run.source, run.control)
    return time.perf_counter() - began


def broadcast(numel: int, times: int, receivers: int) -> float:
    """Called on every rank of three. Seconds of one broadcast of `numel` float32 from rank 0 to so many others."""
    members = list(range(3)) if receivers == 2 else [0, 2]
    group = dist.new_group(members)
    tensor = torch.zeros(numel)
    took = 0.0
    for _ in range(times):
        dist.barrier()
        began = time.perf_counter()
        if dist.get_rank() in members:
            dist.broadcast(tensor, src=0, group=group)
        dist.barrier()
        took += time.perf_counter() - began
    if dist.get_rank() in members:
        dist.destroy_process_group(group)
    return took / times


def measure(*, rounds: int, size: int, updates: int, bucket_mib: int) -> Report:
    pool = RankPool(RANKS + 1)
    try:
        with (
            tempfile.TemporaryDirectory() as run_dir,
            launch(partial(make_plan, config_of(size, bucket_mib, run_dir))) as run,
        ):
            assert run.updates is not None
            numel = sum(bucket.numel for bucket in run.updates.manifest.buckets)

            def ours(_: int) -> float:
                return sum(update(run) for _ in range(updates)) / updates

            ours(0)  # connects, forms the group, touches the buffers
            pool.run(broadcast, numel, 1, 2)
            seconds, others = in_turns(rounds, ours, lambda _: max(pool.run(broadcast, numel, updates, 2)))
            alone = [max(pool.run(broadcast, numel, updates, 1)) for _ in range(rounds)]
    finally:
        pool.close()
    return Report(
        name="weight_update",
        size=f"{numel / 1e6:.1f} M float32 parameters, {RANKS} ranks, 1 engine, buckets of {bucket_mib} MiB",
        comparisons=[
            Comparison(
                what="one update",
                against="gloo broadcast to both others of three processes",
                ours=seconds,
                other=others,
                target=1.5,
            ),
            Comparison(what="the same", against="gloo broadcast to one other process", ours=seconds, other=alone),
        ],
        numbers=[Number(what="bytes a second", values=[4e-9 * numel / each for each in seconds], unit="GB/s")],
        note=(
            "From the driver's calls until all ranks and the engine have answered, over Ray, in the processes of a "
            "run. Half of the weights are gathered from rank 1 to rank 0, all are sent to the engine, each side "
            "computes a checksum, and the engine copies the weights into its parameters. The broadcast sends one ready "
            "tensor of as many bytes among three other processes."
        ),
    )


if __name__ == "__main__":
    command = parser(__doc__, rounds=7, size=14, unit="layers; 14 are 90 M parameters")
    command.add_argument("--updates", type=int, default=3, help="in one round (default: 3)")
    command.add_argument("--bucket-mib", type=int, default=256, help="weights.bucket_bytes in MiB (default: 256)")
    args = command.parse_args()
    report = measure(rounds=args.rounds, size=args.size, updates=args.updates, bucket_mib=args.bucket_mib)
    finish(report, args.output)
