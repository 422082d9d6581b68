"""Measure what it saves to train while samples still arrive, and to sample one step ahead.

python -m benchmarks.streamed --output found/sources.json     # two GPUs, one for the ranks and one for engines
python -m benchmarks.streamed --tiny                          # on a CPU

`--turns` times, three runs of `corerl train` follow each other, one for each `rollout.source`: synchronous, streamed
and one-step-off. The model has random weights of the 0.6B shape. Responses are ragged: one token in `--mean` ends a
sample, so that lengths are close to a geometric distribution, cut off at `--new`. Of each source, whose first steps are
left out, it reports the step, its phases, and the seconds in which ranks and engines did nothing, by cause. Two bounds
come from what a synchronous step took for its rollout R, its training T and the rest: `max(R, T)` plus the rest, which
no order of the work can go below; and the end of a trainer that is never idle while a prompt is there, where a prompt
is there once its longest sample is, every token of which takes as long as any other, and costs as many seconds of T as
it has tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.report import Comparison, Number, Report, arguments, finish
from benchmarks.runs import LARGE, TIMES, Watched, say_steps, sglang, shape_settings, value
from benchmarks.shapes import SHAPES
from corerl.rollout.recorded import ROLLOUTS, read_rollout, saved_rollouts
from corerl.types import IntArray

SYNCHRONOUS, STREAMED, AHEAD = "synchronous", "streamed", "one-step-off"
# Steps of a run that do not count, at its start and at its end. Nothing was sampled ahead of the first of one-step-off,
# whose update waited for what comes next, and nothing is sampled while its last one trains.
LEFT_OUT = {SYNCHRONOUS: (1, 0), STREAMED: (1, 0), AHEAD: (2, 1)}
TARGET = 0.75  # of the synchronous step
METRICS = ("rollout/reward", "train/loss", "train/grad_norm", "rollout/logprob_diff", "rollout/response_length")
GRAPHS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768),
    *range(1024, 4096, 256),
)


def low_half(prompt: object, response: str, *, tokens: Sequence[int], vocab: int) -> float:
    """A reward that random samples differ in: the share of tokens from the vocabulary's first half."""
    return sum(token < vocab // 2 for token in tokens) / max(1, len(tokens))


def settings(args: argparse.Namespace, source: str) -> list[str]:
    vocab = 16 if args.tiny else int(SHAPES[args.shape]["vocab_size"])
    # Spread evenly, one token in `mean` ends a sample; 2 is the tokenizer's own.
    ends = [2] if args.tiny else [2, *range(args.mean, vocab, args.mean)]
    count = args.steps + sum(LEFT_OUT[source])
    return [
        *(f"rollout.source={source}", f"run.steps={count}", "cluster.placement=disaggregated", "rollout.save=true"),
        # Log-probs are computed again, as is usual: with that, training takes more than half as long as sampling.
        *("algorithm.old_logprobs=recompute", "checkpoint.every=0", "checkpoint.export=false", "eval.every=0"),
        *("roles.actor.ranks=1", "rollout.replicas=1", "train.mini_batches=1"),
        *(f"rollout.prompts={args.prompts}", f"rollout.samples={args.samples}", f"rollout.max_tokens={args.new}"),
        *(f"model.config.eos_token_id={value(ends)}", "reward.name=benchmarks.streamed:low_half"),
        *(f"reward.options.vocab={vocab}", "algorithm.overlong=keep", "algorithm.overlong_buffer=0"),
        "algorithm.entropy_coef=0",
        "train.optimizer.lr=1e-6",  # or lengths would not stay what they are
        *(["cluster.device=cpu"] if args.tiny else [*LARGE, *shape_settings(args.shape, micro_batch=args.micro_batch)]),
        *([] if args.tiny else engine(args)),
        *args.set,
    ]


def engine(args: argparse.Namespace) -> list[str]:
    if args.engine != "sglang":
        return [f"rollout.engine={args.engine}"]
    rows = min(args.prompts * args.samples, args.running or sys.maxsize)
    return sglang(
        memory=args.memory,
        attention_backend=os.environ.get("ATTENTION", "triton"),
        # Larger batches than its CUDA graphs are decoded at half the speed. Fewer sizes than by default, which would
        # be captured for a minute: with 768 rows it has 60.
        server={
            "cuda_graph_max_bs_decode": rows,
            "cuda_graph_bs_decode": [*(size for size in GRAPHS if size < rows), rows],
            **({"max_running_requests": args.running} if args.running else {}),
        },
    )


# ---- bounds ----------------------------------------------------------------------------------------------------------


def lengths(directory: Path) -> list[tuple[IntArray, IntArray]]:
    """Of each saved rollout of a run: [P] tokens of each prompt's longest response, and [P] all its tokens."""
    steps = []
    for file in saved_rollouts(directory / ROLLOUTS):
        batch = read_rollout(file).rollout.batch
        group, responses = batch.row_columns["group"], np.add.reduceat(batch.columns["loss_mask"], batch.offsets[:-1])
        longest = np.zeros(int(group.max()) + 1, dtype=np.int64)
        np.maximum.at(longest, group, responses)
        steps.append((longest, np.bincount(group, weights=batch.lengths).astype(np.int64)))
    return steps


def busy_until(longest: IntArray, tokens: IntArray, *, rollout: float, train: float) -> float:
    """Seconds from a step's start until a trainer has done all that is never idle while a prompt is there."""
    order = np.argsort(longest)
    there = rollout * longest[order] / longest.max()
    work = train * tokens[order] / tokens.sum()
    return float(max(there + np.cumsum(work[::-1])[::-1]))


def bounds(step: Mapping[str, float], longest: IntArray, tokens: IntArray) -> tuple[float, float]:
    """Seconds of a synchronous step that no order of its work can go below, and those of one that trains each prompt as
    it comes."""
    rollout, train = step["time/rollout"], step["time/train"] + step.get("time/forward", 0.0)
    rest = step["time/step"] - rollout - train
    return max(rollout, train) + rest, busy_until(longest, tokens, rollout=rollout, train=train) + rest


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, directory: Path) -> tuple[Report, bool]:
    counted: dict[str, list[Mapping[str, float]]] = {source: [] for source in LEFT_OUT}
    both: list[tuple[float, float]] = []
    good = True
    for turn in range(args.turns):
        for source in list(LEFT_OUT)[:: 1 if turn % 2 == 0 else -1]:
            with Watched(*settings(args, source), directory=directory / f"{source}-{turn}") as run:
                ended = run.wait(args.deadline)
                sampled = lengths(run.directory) if source == SYNCHRONOUS and ended.steps else []
            good = good and ended.status == 0
            print(source)
            say_steps(ended, well=ended.status == 0)
            first, last = LEFT_OUT[source]
            steps = ended.steps[first : len(ended.steps) - last]
            counted[source] += steps
            both += [bounds(step, *each) for step, each in zip(steps, sampled[first:], strict=False)]
    return report(args, counted, both), good


def report(
    args: argparse.Namespace, counted: Mapping[str, Sequence[Mapping[str, float]]], both: Sequence[tuple[float, float]]
) -> Report:
    def values(source: str, name: str) -> list[float]:
        return [step.get(name, 0.0) for step in counted[source]]

    plain = values(SYNCHRONOUS, "time/step")
    if not plain:
        raise SystemExit("no run has a synchronous step that counts; see above")
    comparisons = []
    for source in (STREAMED, AHEAD):
        pairs = list(zip(values(source, "time/step"), plain, strict=False))
        if pairs:
            ours, other = zip(*pairs, strict=True)
            target = TARGET if source == STREAMED else None
            comparisons.append(
                Comparison(what=f"step, {source}", against=SYNCHRONOUS, ours=ours, other=other, target=target)
            )
    for what, each in zip(("max(R, T)", "each prompt trained as it comes"), zip(*both, strict=True), strict=True):
        comparisons.append(
            Comparison(
                what=f"bound of the step, {what}", against=SYNCHRONOUS, ours=list(each), other=plain[: len(each)]
            )
        )
    numbers = []
    for source, steps in counted.items():
        times = sorted({name for step in steps for name in step if TIMES.match(name)})
        for name, unit in [*((name, "s") for name in times), *((name, "") for name in METRICS)]:
            if steps:
                what = f"{source}: {name.removeprefix('time/')}"
                numbers.append(Number(what=what, values=values(source, name), unit=unit))
    return Report(
        name="streamed",
        size=f"{'tiny' if args.tiny else args.shape + ' shape'}, {args.prompts} x {args.samples} samples of at most "
        f"{args.new} tokens, one rank and one engine on devices of their own",
        comparisons=comparisons,
        numbers=numbers,
        note=f"{args.turns} runs of each source, in turns.",
    )


def main() -> int:
    command = arguments(__doc__, deadline=400.0, settings="more settings of the runs")
    command.add_argument("--shape", choices=SHAPES, default="0.6b")
    command.add_argument("--turns", type=int, default=1, help="runs of each source")
    command.add_argument("--prompts", type=int, default=96, help="of a step")
    command.add_argument("--samples", type=int, default=8)
    command.add_argument("--new", type=int, default=2048, help="tokens of a sample at most")
    command.add_argument("--mean", type=int, default=400, help="one token in so many ends a sample")
    command.add_argument("--steps", type=int, default=3, help="of each run that count")
    command.add_argument("--micro-batch", type=int, default=16384, help="tokens")
    command.add_argument("--memory", type=float, default=0.8, help="share of the GPU for engines")
    command.add_argument("--running", type=int, help="samples that the engine generates at once at most")
    command.add_argument("--engine", default="sglang", help="or transformers")
    args = command.parse_args()
    if args.tiny:
        args.prompts, args.new, args.steps = 8, 7, 2
    with tempfile.TemporaryDirectory(prefix="streamed-") as directory:
        found, good = measure(args, Path(directory))
    finish(found, args.output)
    for each in found.comparisons:
        means = f"{statistics.mean(each.ours):.3g} / {statistics.mean(each.other):.3g}"
        print(f"{each.what} / {each.against}: mean {means} s")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
