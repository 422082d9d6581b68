"""Measure where a colocated GRPO step spends its time: seconds by phase of a real run, with a limit for each phase.

python -m benchmarks.grpo_step 0.6b --output found/grpo.json                                        # one GPU
python -m benchmarks.grpo_step 8b --ranks 4 --replicas 4 --limit rollout=3.1 train=4.9 update_weights=0.2
python -m benchmarks.grpo_step 0.6b --tiny                                                          # on a CPU

The run is `corerl train` with random weights, the quickstart's prompts, the SGLang engine, and samples of fixed length
(only one of 151,936 tokens ends a sample). Phases are those that the run reports for each step (`time/...`), without
the first steps. A limit is the time that the same work takes alone, on the same machine, as measured by other scripts:

    rollout          the other side of engine_throughput, with as many samples and tokens
    train            model FLOPs over the bare loop's FLOP/s (train_step)
    update_weights   the other side of weight_update, the engine's own load
    sleep, wake_up   bytes over the bandwidth of raw pinned copies (sleep)

Limits given as `--limit PHASE=SECONDS` are shown next to their phases, and their sum next to the step.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks.report import Comparison, Number, Report, arguments, finish
from benchmarks.runs import LARGE, Ended, Watched, say_steps, sglang, shape_settings
from benchmarks.shapes import SHAPES


def settings(args: argparse.Namespace) -> list[str]:
    common = [
        *(f"backend.name={args.backend}", f"roles.actor.ranks={args.ranks}", f"rollout.replicas={args.replicas}"),
        *(f"rollout.prompts={args.prompts}", f"rollout.samples={args.samples}", f"rollout.max_tokens={args.new}"),
        *(f"run.steps={args.steps + args.warm}", "train.mini_batches=1", "eval.every=0", "checkpoint.every=0"),
        *("checkpoint.export=false", f"weights.bucket_bytes={args.bucket_mib * 2**20}"),
    ]
    if args.tiny:
        return [*common, "cluster.device=cpu", "cluster.offload=always", *args.set]
    return [
        *common,
        *(LARGE if args.backend == "fsdp" else ()),
        *shape_settings(args.shape, micro_batch=args.micro_batch),
        *sglang(
            memory=args.memory,
            tensor_parallel=args.tensor_parallel,
            attention_backend=os.environ.get("ATTENTION", "triton"),
            # Larger batches than its CUDA graphs are decoded at half the speed.
            server={"cuda_graph_max_bs_decode": -(-args.prompts * args.samples // args.replicas)},
        ),
        *args.set,
    ]


def report(args: argparse.Namespace, ended: Ended, command: str) -> Report:
    steps = ended.steps[args.warm :]
    limits = {name: float(seconds) for name, seconds in (each.split("=") for each in args.limit)}
    phases = [name for name in ended.phases(after=args.warm) if name != "step"]
    if unknown := limits.keys() - set(phases):
        raise SystemExit(f"--limit: the run has no phase {sorted(unknown)[0]!r}; it has {', '.join(phases)}")

    def seconds(name: str) -> list[float]:
        return [step.get(f"time/{name}", 0.0) for step in steps]

    total, inside = seconds("step"), [sum(each) for each in zip(*(seconds(name) for name in phases), strict=True)]
    comparisons = [
        Comparison(what=name, against="its limit", ours=seconds(name), other=[limits[name]] * len(steps))
        for name in phases
        if name in limits
    ]
    if limits:
        bound = [sum(limits.values())] * len(steps)
        comparisons.append(Comparison(what="step", against="sum of the limits", ours=total, other=bound))
    numbers = [Number(what="step", values=total, unit="s")]
    for name in sorted(phases, key=lambda phase: -sum(seconds(phase))):
        share = [100 * part / whole for part, whole in zip(seconds(name), total, strict=True)]
        numbers += [
            Number(what=f"in it: {name}", values=seconds(name), unit="s"),
            Number(what=f"in it: {name}, share", values=share, unit="%"),
        ]
    rest = [whole - part for whole, part in zip(total, inside, strict=True)]
    # Over all steps: none is told of later ones, where ranks and engines stay in memory.
    peaks = {
        name: values
        for name in sorted({each for step in ended.steps for each in step if each.startswith("memory/")})
        if (values := [step[name] for step in ended.steps if name in step])
    }
    differences = [step["rollout/logprob_diff"] for step in steps]
    lengths = [step["rollout/response_length"] for step in steps]
    return Report(
        name="grpo_step",
        size=f"{'tiny' if args.tiny else args.shape + ' shape'}, {args.prompts} x {args.samples} samples, "
        f"{args.ranks} {args.backend} ranks, {args.replicas} engines of {args.tensor_parallel}",
        comparisons=comparisons,
        numbers=[
            *numbers,
            Number(what="in it: the driver, between phases", values=rest, unit="s"),
            Number(what="tokens of a sample", values=lengths, unit="tokens"),
            Number(what="sampled", values=[step["perf/tokens_per_second"] for step in steps], unit="tokens/s"),
            Number(what="mean log-prob difference", values=differences, unit=""),
            *(
                Number(what=f"most in use: {name.removeprefix('memory/').removesuffix('_gib')}", values=gib, unit="GiB")
                for name, gib in peaks.items()
            ),
        ],
        note=f"`{command}`. Steps {args.warm} to {len(ended.steps) - 1}, with one optimizer step per batch.",
    )


def main() -> int:
    command = arguments(__doc__, deadline=500.0, settings="more settings of the runs")
    command.add_argument("shape", choices=SHAPES)
    command.add_argument("--backend", default="fsdp")
    command.add_argument("--ranks", type=int, default=1)
    command.add_argument("--replicas", type=int, default=1)
    command.add_argument("--tensor-parallel", type=int, default=1, help="devices of each engine")
    command.add_argument("--prompts", type=int, default=64)
    command.add_argument("--samples", type=int, default=8)
    command.add_argument("--new", type=int, default=512, help="tokens of a sample")
    command.add_argument("--steps", type=int, default=5, help="that count")
    command.add_argument("--warm", type=int, default=3, help="steps before them: kernels are compiled, memory pinned")
    command.add_argument("--bucket-mib", type=int, default=0, help="0: as large as a run has them by itself")
    command.add_argument("--micro-batch", type=int, default=16384, help="tokens")
    command.add_argument("--memory", type=float, default=0.5, help="share of the GPU for weights and KV cache")
    command.add_argument("--limit", nargs="*", default=[], metavar="PHASE=SECONDS")
    args = command.parse_args()
    if args.tiny:
        args = argparse.Namespace(**{**vars(args), "prompts": 8, "samples": 4, "new": 7, "steps": 3})
    with (
        tempfile.TemporaryDirectory(prefix="grpo-") as directory,
        Watched(*settings(args), directory=Path(directory)) as run,
    ):
        ended = run.wait(args.deadline)
        if ended.status != 0:
            say_steps(ended, well=False)
        if len(ended.steps) <= args.warm:
            return 1
        finish(report(args, ended, run.command), args.output)
    return int(ended.status != 0)


if __name__ == "__main__":
    raise SystemExit(main())
