"""Measure what it saves to train while samples still arrive, and what it costs that a trainer's rank is killed.

python -m benchmarks.streamed sources --output found/sources.json     # two GPUs, one for the ranks and one for engines
python -m benchmarks.streamed heal --output found/heal.json           # two GPUs, or one: --gpus 1
python -m benchmarks.streamed sources --tiny                          # on a CPU; heal --tiny too

`sources` runs `corerl train` once with each `rollout.source`, one after the other: the same model, prompts, settings
and number of steps, on random weights of the 0.6B shape. Responses are ragged: one token in `--mean` ends a sample, so
that lengths are close to a geometric distribution, cut off at `--new`. Step n of one source is compared with step n of
the other, without the first steps. Of each source it reports the step, its phases, and the seconds in which ranks and
engines did nothing, by cause. Beside them are two bounds, from what the synchronous run took for its rollout R, its
training T and the rest: `max(R, T)` and the rest, which no order of the work can go below; and the end of a trainer
that is never idle while a prompt is there, where a prompt is there once its longest sample is, every token of which is
as long as any other, and costs as many seconds of T as it has tokens.

`heal` kills the rank with SIGKILL as it computes gradients, in a run with checkpoints on disk and in one that keeps
copies of every step in memory; both at the same time, each colocated on a GPU of its own, or one after the other. It
reports the seconds from then to the end of the next step, of which parts are given, and to the end of the first step
that was not done before. What copies cost is the ratio of the two runs' steps before the kill, of which the one on disk
has not yet saved anything, and the seconds for which the loop waited.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field, frozen

from benchmarks.colocated_update import SHAPES
from benchmarks.grpo_step import FIELDS, MORE
from benchmarks.report import Comparison, Number, Report, finish
from benchmarks.runs import Ended, Watched, sglang, value
from corerl.algorithms import LossInputs, LossResult
from corerl.algorithms.losses import clipped
from corerl.driver.checkpoints import MEMORY
from corerl.rollout.sources.recorded import ROLLOUTS, read_rollout, saved_rollouts
from corerl.types import IntArray

SYNCHRONOUS, STREAMED, AHEAD = "synchronous", "streamed", "one-step-off"
DISK, COPIED = "disk", "memory"
TARGET, COPIES = 0.75, 1.02  # of the synchronous step; of the step without copies
DIE = "CORERL_BENCHMARK_DIE"  # names a file: once it is there, a rank writes when it dies beside it, and dies
CUDA = "CUDA_VISIBLE_DEVICES"
LEARNS_NOTHING = "train.optimizer.lr=1e-6"  # or lengths would not stay what they are


# ---- what runs use ---------------------------------------------------------------------------------------------------


def low_half(prompt: object, response: str, *, tokens: Sequence[int], vocab: int) -> float:
    """A reward that random samples differ in: the share of tokens from the vocabulary's first half."""
    return sum(token < vocab // 2 for token in tokens) / max(1, len(tokens))


def mortal(inputs: LossInputs, **params: Any) -> LossResult:
    """`clipped`, in a rank that can be told to die."""
    if (told := Path(os.environ[DIE])).exists():
        told.rename(told.with_suffix(".told"))  # once: those that are started in its place live
        told.with_suffix(".died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    return clipped(inputs, **params)


def model(args: argparse.Namespace) -> list[str]:
    shape = SHAPES[args.shape]
    vocab = 16 if args.tiny else int(shape["vocab_size"])
    # Spread evenly, one token in `mean` ends a sample; 2 is the tokenizer's own.
    ends = [2] if args.tiny else [2, *range(args.mean, vocab, args.mean)]
    common = [
        *(f"model.config.eos_token_id={value(ends)}", "reward.name=benchmarks.streamed:low_half"),
        *(
            f"reward.options.vocab={vocab}",
            "algorithm.overlong=keep",
            "algorithm.overlong_buffer=0",
            "algorithm.entropy_coef=0",
            LEARNS_NOTHING,
        ),
    ]
    if args.tiny:
        return [*common, "cluster.device=cpu"]
    return [
        *common,
        *("backends.fsdp.shard_size=0", "backends.fsdp.sync=every"),  # the quickstart's are for its small model
        *(f"model.config.{name}={value(shape[name])}" for name in (*FIELDS, *MORE)),
        *("model.config.max_position_embeddings=4096", "model.config.initializer_range=0.02"),
        *("cluster.device=cuda", "train.precision=bfloat16", f"train.tokens_per_micro_batch={args.micro_batch}"),
        *engine(args),
    ]


def engine(args: argparse.Namespace) -> list[str]:
    if args.engine != "sglang":
        return [f"rollout.engine={args.engine}"]
    rows = args.prompts * args.samples
    return sglang(
        memory=args.memory,
        attention_backend=os.environ.get("ATTENTION", "triton"),
        # Larger batches than its CUDA graphs are decoded at half the speed.
        server={"cuda_graph_max_bs_decode": rows},
    )


def settings(args: argparse.Namespace, *more: str) -> list[str]:
    return [
        *("roles.actor.ranks=1", "rollout.replicas=1", "train.mini_batches=1", "eval.every=0"),
        *(f"rollout.prompts={args.prompts}", f"rollout.samples={args.samples}", f"rollout.max_tokens={args.new}"),
        *("checkpoint.export=false", *model(args), *more, *args.set),
    ]


# ---- sources ---------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Sampled:
    """The lengths of a step's samples in tokens."""

    longest: IntArray  # [P] response of each prompt
    tokens: IntArray  # [P] all, prompts too

    def busy_until(self, *, rollout: float, train: float) -> float:
        """Seconds from a step's begin until a trainer has done all, which is never idle while a prompt is there."""
        order = np.argsort(self.longest)
        there = rollout * self.longest[order] / self.longest.max()
        work = train * self.tokens[order] / self.tokens.sum()
        return float(max(there + np.cumsum(work[::-1])[::-1]))


def lengths(directory: Path) -> list[Sampled]:
    """Of the saved batches of a run."""
    steps = []
    for file in saved_rollouts(directory / ROLLOUTS):
        batch = read_rollout(file).rollout.batch
        group, responses = batch.rows["group"], np.add.reduceat(batch.columns["loss_mask"], batch.offsets[:-1])
        longest = np.zeros(int(group.max()) + 1, dtype=np.int64)
        np.maximum.at(longest, group, responses)
        tokens = np.bincount(group, weights=batch.lengths).astype(np.int64)
        steps.append(Sampled(longest=longest, tokens=tokens))
    return steps


def bounds(step: Mapping[str, float], sampled: Sampled) -> tuple[float, float]:
    """Seconds of a synchronous step below which none of its order can go, and which one that trains each prompt as it
    comes would take."""
    rollout, train = step["time/rollout"], step["time/train"] + step.get("time/forward", 0.0)
    rest = step["time/step"] - rollout - train
    return max(rollout, train) + rest, sampled.busy_until(rollout=rollout, train=train) + rest


def sources(args: argparse.Namespace, directory: Path) -> tuple[Report, bool]:
    found: dict[str, Ended] = {}
    sampled: list[Sampled] = []
    for source in (SYNCHRONOUS, STREAMED, AHEAD):
        own = [f"rollout.source={source}", f"run.steps={args.warm + args.steps}", "checkpoint.every=0"]
        placed = ["cluster.placement=disaggregated", "rollout.save=true"]
        with Watched(*settings(args, *own, *placed), directory=directory / source) as run:
            found[source] = ended = run.wait(args.deadline)
            if ended.status == 0 and source == SYNCHRONOUS:
                sampled = lengths(run.directory)
        tell(source, ended, well=ended.status == 0)
    good = all(ended.status == 0 for ended in found.values())
    return sources_report(args, found, sampled), good


def sources_report(args: argparse.Namespace, found: Mapping[str, Ended], sampled: Sequence[Sampled]) -> Report:
    counted = min(len(ended.steps) for ended in found.values()) - args.warm
    if counted < 1 or not sampled:
        raise SystemExit("a run has no step that counts; see above")
    steps = {source: ended.steps[args.warm : args.warm + counted] for source, ended in found.items()}

    def values(source: str, name: str) -> list[float]:
        return [step.get(name, 0.0) for step in steps[source]]

    plain = values(SYNCHRONOUS, "time/step")
    both = [bounds(step, each) for step, each in zip(steps[SYNCHRONOUS], sampled[args.warm :], strict=False)]
    comparisons = [
        Comparison(
            what=f"step, {source}", against=SYNCHRONOUS, ours=values(source, "time/step"), other=plain, target=at
        )
        for source, at in ((STREAMED, TARGET), (AHEAD, None))
    ]
    comparisons += [
        Comparison(what=f"bound of the step, {what}", against=SYNCHRONOUS, ours=list(each), other=plain)
        for what, each in zip(("max(R, T)", "each prompt trained as it comes"), zip(*both, strict=True), strict=True)
    ]
    numbers = []
    for source, own in steps.items():
        names = sorted({name for step in own for name in step if name.startswith(("time/", "idle/"))})
        numbers += [
            Number(what=f"{source}: {name.removeprefix('time/')}", values=values(source, name), unit="s")
            for name in names
        ]
        numbers += [
            Number(what=f"{source}: {name}", values=values(source, name), unit="")
            for name in ("rollout/reward", "train/loss", "train/grad_norm", "rollout/logprob_diff")
        ]
        numbers.append(
            Number(what=f"{source}: tokens of a response", values=values(source, "rollout/response_length"), unit="")
        )
    return Report(
        name="streamed",
        size=f"{'tiny' if args.tiny else args.shape + ' shape'}, {args.prompts} x {args.samples} samples of at most "
        f"{args.new} tokens, one rank and one engine on devices of their own",
        comparisons=comparisons,
        numbers=numbers,
        note=f"Steps {args.warm} to {args.warm + counted - 1} of a run with each source, one after the other.",
    )


# ---- heal ------------------------------------------------------------------------------------------------------------


@define
class Killing:
    """Has a run's rank killed once `after` steps are done, and notes when later steps end. Called all the time."""

    told: Path  # whose presence kills the rank
    after: int
    over: bool = False  # a step is done that was not done before
    died: float = 0.0
    ends: list[tuple[float, int]] = field(factory=list)  # of steps after it, with how many are done then
    _lines: int = 0

    def __call__(self, run: Watched) -> bool:
        lines = sum("time/step" in line for line in run.lines())
        if self.died and lines > self._lines:
            self.ends.append((time.monotonic(), lines))
            self.over = lines > self.after
        self._lines = lines
        if not self.died and lines >= self.after:
            if (when := self.told.with_suffix(".died")).exists() and (text := when.read_text()):
                self.died = float(text)
            elif not self.told.with_suffix(".told").exists():
                self.told.touch()
        return self.over

    def seconds(self) -> tuple[float, float]:
        """From its death to the end of the next step, and of the first that was not done before."""
        new = next((when for when, done in self.ends if done > self.after), float("nan"))
        return (self.ends[0][0] if self.ends else float("nan")) - self.died, new - self.died


@frozen(kw_only=True)
class Healed:
    ended: Ended
    next_step: float  # seconds from the kill
    new_step: float
    told: str  # from what the run goes on


def heal(args: argparse.Namespace, directory: Path) -> tuple[Report, bool]:
    """The run on disk saves a step before the other is killed, and both are killed in the step after that."""
    kept = {
        DISK: [f"checkpoint.every={args.warm + args.steps}"],
        COPIED: ["checkpoint.every=0", "checkpoint.memory=true"],
    }
    with ThreadPoolExecutor(args.gpus) as threads:
        running = {
            kind: threads.submit(killed, args, kind, more, directory / kind, number % args.gpus)
            for number, (kind, more) in enumerate(kept.items())
        }
        found = {kind: each.result() for kind, each in running.items()}
    for kind, each in found.items():
        tell(kind, each.ended, well=each.new_step > 0)
    good = all(each.told and each.new_step > 0 for each in found.values())
    return heal_report(args, found), good


def killed(args: argparse.Namespace, kind: str, more: Sequence[str], directory: Path, gpu: int) -> Healed:
    directory.mkdir(parents=True, exist_ok=True)
    killing = Killing(directory / "die", args.warm + args.steps + 1)
    environment = {DIE: str(killing.told), **({} if args.tiny else {CUDA: str(gpu)})}
    own = [f"run.steps={killing.after + 2}", "cluster.offload=never", "algorithm.loss=benchmarks.streamed:mortal"]
    copies = f"corerl-{os.getuid()}-*"
    before = set(MEMORY.glob(copies))
    with Watched(*settings(args, *own, *more), directory=directory, environment=environment) as run:
        ended = run.wait(args.deadline, killing)
    for left in set(MEMORY.glob(copies)) - before if kind == COPIED else ():
        shutil.rmtree(left, ignore_errors=True)  # a run that ends by itself does so
    told = re.search(r"all ranks are started anew from ([^\n]*)", " ".join(ended.output.split("\n")))
    next_step, new_step = killing.seconds()
    return Healed(ended=ended, next_step=next_step, new_step=new_step, told=told[1][:80] if told else "")


def heal_report(args: argparse.Namespace, found: Mapping[str, Healed]) -> Report:
    compared = slice(args.warm, args.warm + args.steps)  # before any save on disk
    before = {kind: each.ended.steps[compared] for kind, each in found.items()}
    if min(map(len, before.values())) < 1:
        raise SystemExit("a run has no step that counts; see above")
    pairs = list(zip(before[COPIED], before[DISK], strict=False))
    comparisons = [
        Comparison(
            what=f"{name}, with copies in memory",
            against="without",
            ours=[with_copies[key] for with_copies, _ in pairs],
            other=[without[key] for _, without in pairs],
            target=at,
        )
        for name, key, at in (("step", "time/step", COPIES), ("train", "time/train", None))
    ]
    numbers = []
    for kind, each in found.items():
        numbers.append(Number(what=f"{kind}: kill to the end of the next step", values=[each.next_step], unit="s"))
        numbers.append(Number(what=f"{kind}: kill to the end of a new step", values=[each.new_step], unit="s"))
        for step in each.ended.steps:
            if "time/starting the ranks anew" in step:
                numbers += [
                    Number(
                        what=f"{kind}: of the step after the kill, {name.removeprefix('time/')}",
                        values=[took],
                        unit="s",
                    )
                    for name, took in step.items()
                    if name.startswith("time/")
                ]
        own = [step.get("time/save", 0.0) for step in before[kind]]
        numbers.append(Number(what=f"{kind}: the loop waits for saves, a step", values=own, unit="s"))
    told = "; ".join(f"{kind}: {each.told}" for kind, each in found.items())
    return Report(
        name="heal",
        size=f"{'tiny' if args.tiny else args.shape + ' shape'}, {args.prompts} x {args.samples} samples of at most "
        f"{args.new} tokens, one rank and one engine on {'a CPU' if args.tiny else 'one GPU'}",
        comparisons=comparisons,
        numbers=numbers,
        note=f"Killed in the step after {args.warm + args.steps + 1} were done. Started anew: {told}.",
    )


# ---- program ---------------------------------------------------------------------------------------------------------


def tell(name: str, ended: Ended, *, well: bool) -> None:
    """What each step took, at once: a command that is cut off leaves what it found."""
    if not well:
        print(f"{name}: the run ended with {ended.status} after {len(ended.steps)} steps:\n{ended.output[-4000:]}")
    for number, step in enumerate(ended.steps):
        seconds = (
            f"{each.removeprefix('time/')} {took:.3g}" for each, took in step.items() if each.startswith("time/")
        )
        idle = (f"{each} {took:.3g}" for each, took in step.items() if each.startswith("idle/"))
        print(f"{name}, step {number}: {', '.join([*seconds, *idle])}", flush=True)


def main() -> int:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("part", choices=("sources", "heal"))
    command.add_argument("--shape", choices=SHAPES, default="0.6b")
    command.add_argument("--prompts", type=int, help="of a step; 96, and 64 in heal")
    command.add_argument("--samples", type=int, default=8)
    command.add_argument("--new", type=int, help="tokens of a sample at most; 2048, and 1024 in heal")
    command.add_argument("--mean", type=int, default=400, help="one token in so many ends a sample")
    command.add_argument("--steps", type=int, default=3, help="that count")
    command.add_argument("--warm", type=int, default=1, help="steps before them: kernels are compiled, memory pinned")
    command.add_argument("--micro-batch", type=int, help="tokens; 16384, and 8192 in heal")
    command.add_argument("--memory", type=float, help="share of the GPU for engines; 0.8, and 0.4 in heal")
    command.add_argument("--engine", default="sglang", help="or transformers")
    command.add_argument("--gpus", type=int, choices=(1, 2), default=2, help="of heal")
    command.add_argument("--deadline", type=float, default=400.0, help="seconds of a run, its start included")
    command.add_argument("--set", nargs="*", default=[], help="more settings of the runs")
    command.add_argument("--tiny", action="store_true", help="on a CPU: the quickstart's model, engine transformers")
    command.add_argument("--runs", help="a directory in which the runs are left; without it they are removed")
    command.add_argument("--output", help="a JSON file; without it a table is printed")
    args = command.parse_args()
    usual = {"prompts": 96, "new": 2048, "micro_batch": 16384, "memory": 0.8}
    if args.part == "heal":
        usual = {"prompts": 64, "new": 1024, "micro_batch": 8192, "memory": 0.4}
    if args.tiny:
        usual |= {"prompts": 8, "new": 7}
    args = argparse.Namespace(**{name: usual.get(name) if own is None else own for name, own in vars(args).items()})
    with tempfile.TemporaryDirectory(prefix="streamed-") as directory:
        part = {"sources": sources, "heal": heal}[args.part]
        report, good = part(args, Path(args.runs or directory))
    finish(report, args.output)
    if args.output:
        finish(report, None)
    print(report.note)
    for each in report.comparisons:
        print(
            f"{each.what} / {each.against}: mean {statistics.mean(each.ours):.3g} / {statistics.mean(each.other):.3g} s"
        )
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
