"""Measure what it saves to train while samples still arrive.

python -m benchmarks.streamed --output found/sources.json     # two GPUs, one for the ranks and one for engines
python -m benchmarks.streamed --tiny                          # on a CPU

`sources` is one run of `corerl train`, in which synchronous and streamed steps take turns, so that both find the same
machine, the same engine and the same weights but for an update; the last steps are one-step-off. The source that hands
out the steps in turns is below; all else is as in any run. The model has random weights of the 0.6B shape. Responses
are ragged: one token in `--mean` ends a sample, so that lengths are close to a geometric distribution, cut off at
`--new`. Of each source, whose first step is left out, it reports the step, its phases, and the seconds in which ranks
and engines did nothing, by cause. Beside them are two bounds, from what a synchronous step took for its rollout R, its
training T and the rest: `max(R, T)` and the rest, which no order of the work can go below; and the end of a trainer
that is never idle while a prompt is there, where a prompt is there once its longest sample is, every token of which is
as long as any other, and costs as many seconds of T as it has tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import numpy as np
from attrs import evolve, frozen

from benchmarks.colocated_update import SHAPES
from benchmarks.grpo_step import FIELDS, MORE
from benchmarks.report import Comparison, Number, Report, finish
from benchmarks.runs import Ended, Watched, sglang, value
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
    command.add_argument("--shape", choices=SHAPES, default="0.6b")
    command.add_argument("--prompts", type=int, help="of a step; 96")
    command.add_argument("--samples", type=int, default=8)
    command.add_argument("--new", type=int, help="tokens of a sample at most; 2048")
    command.add_argument("--mean", type=int, default=400, help="one token in so many ends a sample")
    command.add_argument("--steps", type=int, default=3, help="that count")
    command.add_argument("--micro-batch", type=int, help="tokens; 16384")
    command.add_argument("--memory", type=float, help="share of the GPU for engines; 0.8")
    command.add_argument("--running", type=int, help="samples that the engine draws at once at most; all without it")
    command.add_argument("--engine", default="sglang", help="or transformers")
    command.add_argument("--ahead", type=int, default=2, help="steps of one-step-off that count")
    command.add_argument("--deadline", type=float, default=400.0, help="seconds of a run, its start included")
    command.add_argument("--set", nargs="*", default=[], help="more settings of the runs")
    command.add_argument("--tiny", action="store_true", help="on a CPU: the quickstart's model, engine transformers")
    command.add_argument("--runs", help="a directory in which the runs are left; without it they are removed")
    command.add_argument("--output", help="a JSON file; without it a table is printed")
    args = command.parse_args()
    usual = {"prompts": 96, "new": 2048, "micro_batch": 16384, "memory": 0.8}
    if args.tiny:
        usual |= {"prompts": 8, "new": 7}
    args = argparse.Namespace(**{name: usual.get(name) if own is None else own for name, own in vars(args).items()})
    with tempfile.TemporaryDirectory(prefix="streamed-") as directory:
        report, good = sources(args, Path(args.runs or directory))
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
