"""Measure what it saves to train while samples still arrive, and what it costs that a trainer's rank is killed.

python -m benchmarks.streamed sources --output found/sources.json     # two GPUs, one for the ranks and one for engines
python -m benchmarks.streamed heal --output found/heal.json           # two GPUs, or one: --gpus 1
python -m benchmarks.streamed sources --tiny                          # on a CPU; heal --tiny too

`sources` is one run of `corerl train`, in which synchronous and streamed steps take turns, so that both find the same
machine, the same engine and the same weights but for an update; the last steps are one-step-off. The source that hands
out the steps in turns is below; all else is as in any run. The model has random weights of the 0.6B shape. Responses
are ragged: one token in `--mean` ends a sample, so that lengths are close to a geometric distribution, cut off at
`--new`. Of each source, whose first step is left out, it reports the step, its phases, and the seconds in which ranks
and engines did nothing, by cause. Beside them are two bounds, from what a synchronous step took for its rollout R, its
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
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import numpy as np
from attrs import define, evolve, field, frozen

from benchmarks.colocated_update import SHAPES
from benchmarks.grpo_step import FIELDS, MORE
from benchmarks.report import Comparison, Number, Report, finish
from benchmarks.runs import Ended, Watched, sglang, value
from corerl.algorithms import LossInputs, LossResult
from corerl.algorithms.losses import clipped
from corerl.checkpoint.writer import MEMORY
from corerl.data.prompts import PromptStream
from corerl.driver import sampling
from corerl.engines.fleet import EngineFleet
from corerl.plan.plan import RolloutPlan
from corerl.rollout.recorded import ROLLOUTS, read_rollout, saved_rollouts
from corerl.rollout.scored import ScoredRollout
from corerl.rollout.source import Arrived, Source
from corerl.types import IntArray

SYNCHRONOUS, STREAMED, AHEAD = "synchronous", "streamed", "one-step-off"
DISK, COPIED = "disk", "memory"
TARGET, COPIES = 0.75, 1.02  # of the synchronous step; of the step without copies
DIE = "CORERL_BENCHMARK_DIE"  # names a file: once it is there, a rank writes when it dies beside it, and dies
GRAPHS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768),
    *range(1024, 4096, 256),
)
TURNS = "CORERL_BENCHMARK_TURNS"  # names the source of each step
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


class InTurns(Source):
    """Each step comes from the source that has its turn. One-step-off comes last: it has drawn what comes next."""

    def __init__(self, turns: Sequence[str], sources: Mapping[str, Source], stream: PromptStream) -> None:
        self._turns, self._sources, self._stream = turns, sources, stream
        self._step = 0  # the next
        self._last = ""  # whose turn it was

    @property
    def streams(self) -> bool:
        return self._step < len(self._turns) and self._sources[self._turns[self._step]].streams

    @property
    def overlaps(self) -> bool:
        return bool(self._last) and self._sources[self._last].overlaps

    def _turn(self) -> Source:
        name = self._turns[self._step]
        if name != self._last:
            self._last = name
            self._sources[name].restore({"rollout_step": self._step, "prompts": self._stream.position})
        return self._sources[name]

    async def arrived(self) -> Arrived | None:
        return await self._turn().arrived() if self._step < len(self._turns) else None

    async def next(self) -> ScoredRollout | None:
        if self._step >= len(self._turns):
            return None
        scored = await self._turn().next()
        self._step += 1
        return scored

    @property
    def position(self) -> dict[str, Any]:
        return self._sources[self._last].position

    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        raise NotImplementedError("nothing resumes this run")

    def updating(self, version: int) -> AbstractContextManager[None]:
        return self._sources[self._last].updating(version)

    def close(self) -> None:
        for each in self._sources.values():
            each.close()


def main_in_turns() -> int:
    """`corerl`, whose run has its steps from `InTurns`."""
    made, turns = sampling.make_source, os.environ[TURNS].split(",")

    def make(plan: RolloutPlan, fleet: EngineFleet, *more: Any, **named: Any) -> Source:
        settings = {name: evolve(plan.settings, source=cast(Any, name)) for name in dict.fromkeys(turns)}
        sources = {name: made(evolve(plan, settings=each), fleet, *more, **named) for name, each in settings.items()}
        stream = PromptStream(plan.prompts, plan.seed)
        for each in sources.values():
            each._draws = evolve(each._draws, stream=stream)  # type: ignore[attr-defined]
        return InTurns(turns, sources, stream)

    sampling.make_source = make
    from corerl.cli.main import main as corerl

    return corerl()


def sources(args: argparse.Namespace, directory: Path) -> tuple[Report, bool]:
    turns = [SYNCHRONOUS, STREAMED] * (1 + args.steps) + [AHEAD] * (3 + args.ahead if args.ahead else 0)
    own = [f"run.steps={len(turns)}", f"rollout.source={STREAMED}", "checkpoint.every=0"]
    # Log-probs are computed again, as is usual: with that, training takes more than half as long as sampling.
    own += ["cluster.placement=disaggregated", "rollout.save=true", "algorithm.old_logprobs=recompute"]
    named = {"environment": {TURNS: ",".join(turns)}, "main": "benchmarks.streamed:main_in_turns"}

    def all_done(run: Watched) -> bool:  # what is left is a checkpoint
        return sum("time/step" in line for line in run.lines()) == len(turns)

    with Watched(*settings(args, *own), directory=directory / "sources", **named) as run:  # type: ignore[arg-type]
        ended = run.wait(args.deadline, all_done)
        sampled = lengths(run.directory) if ended.steps else []
    tell("sources", ended, well=len(ended.steps) == len(turns))
    return sources_report(args, turns, ended.steps, sampled), len(ended.steps) == len(turns)


def sources_report(
    args: argparse.Namespace,
    turns: Sequence[str],
    done: Sequence[Mapping[str, float]],
    sampled: Sequence[Sampled],
) -> Report:
    """Of all that was done, each source's first step aside. Of one-step-off the first two and the last are left out:
    nothing was drawn ahead of the first, whose update waited for what it drew, and nothing is drawn beside the last."""
    of: dict[str, list[int]] = {source: [] for source in dict.fromkeys(turns)}
    for number, source in enumerate(turns[: len(done)]):
        of[source].append(number)
    counted = {source: numbers[2:-1] if source == AHEAD else numbers[1:] for source, numbers in of.items()}
    pairs = min(len(counted[SYNCHRONOUS]), len(counted[STREAMED]))
    if not pairs:
        raise SystemExit("the run has no step that counts; see above")

    def values(source: str, name: str) -> list[float]:
        return [done[number].get(name, 0.0) for number in counted[source]]

    plain = values(SYNCHRONOUS, "time/step")
    both = [bounds(done[number], sampled[number]) for number in counted[SYNCHRONOUS]]
    streamed = values(STREAMED, "time/step")[:pairs]
    comparisons = [
        Comparison(what="step, streamed", against=SYNCHRONOUS, ours=streamed, other=plain[:pairs], target=TARGET)
    ]
    if ahead := values(AHEAD, "time/step") if counted.get(AHEAD) else []:
        mean = [statistics.mean(plain)] * len(ahead)
        comparisons.append(Comparison(what=f"step, {AHEAD}", against=f"mean {SYNCHRONOUS}", ours=ahead, other=mean))
    comparisons += [
        Comparison(what=f"bound of the step, {what}", against=SYNCHRONOUS, ours=list(each), other=plain)
        for what, each in zip(("max(R, T)", "each prompt trained as it comes"), zip(*both, strict=True), strict=True)
    ]
    numbers = []
    for source, own in counted.items():
        names = sorted({name for each in own for name in done[each] if name.startswith(("time/", "idle/"))})
        numbers += [
            Number(what=f"{source}: {name.removeprefix('time/')}", values=values(source, name), unit="s")
            for name in names
            if own
        ]
        numbers += [
            Number(what=f"{source}: {name}", values=values(source, name), unit="")
            for name in ("rollout/reward", "train/loss", "train/grad_norm", "rollout/logprob_diff")
            if own
        ]
        if own:
            lengths_of = values(source, "rollout/response_length")
            numbers.append(Number(what=f"{source}: tokens of a response", values=lengths_of, unit=""))
    return Report(
        name="streamed",
        size=f"{'tiny' if args.tiny else args.shape + ' shape'}, {args.prompts} x {args.samples} samples of at most "
        f"{args.new} tokens, one rank and one engine on devices of their own",
        comparisons=comparisons,
        numbers=numbers,
        note=f"Steps in turns: {', '.join(turns)}.",
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
    told = re.search(r"restarting all ranks from ([^\n]*)", " ".join(ended.output.split("\n")))
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
            if "time/restart" in step:
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
        note=f"Killed in the step after {args.warm + args.steps + 1} were done. Restarted from {told}.",
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
    command.add_argument("--warm", type=int, default=1, help="steps before them in heal: memory is pinned")
    command.add_argument("--micro-batch", type=int, help="tokens; 16384, and 8192 in heal")
    command.add_argument("--memory", type=float, help="share of the GPU for engines; 0.8, and 0.4 in heal")
    command.add_argument("--running", type=int, help="samples that the engine draws at once at most; all without it")
    command.add_argument("--engine", default="sglang", help="or transformers")
    command.add_argument("--ahead", type=int, default=2, help="steps of one-step-off that count")
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
