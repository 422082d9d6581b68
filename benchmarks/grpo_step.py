"""Measure steps of whole runs of `corerl train`: their phases, what they would take at least, and whether they grow.

python -m benchmarks.grpo_step 0.6b --output found/grpo.json                                        # one GPU
python -m benchmarks.grpo_step 8b --ranks 4 --replicas 4 --limit rollout=3.1 train=4.9 update_weights=0.2
python -m benchmarks.grpo_step 30b-a3b        # two GPUs
python -m benchmarks.grpo_step sources        # two GPUs, one for the rank and one for the engine
python -m benchmarks.grpo_step steady         # one GPU: memory over 50 steps, every update verified
python -m benchmarks.grpo_step sources --tiny                                                       # on a CPU

Weights are random, the prompts the quickstart's, the engine SGLang (with --tiny transformers). Numbers are those that
the run reports of each step (`time/...`), without the first steps. The cases are:

0.6b, 8b   a colocated step with samples of fixed length: only one of 151,936 tokens ends a sample. What `--limit` gives
           for a phase, its work alone as other benchmarks measure it, is shown next to it, the sum next to the step:
           rollout, the other side of engine_throughput with as many samples and tokens; train, model FLOPs over the
           bare loop's FLOP/s (train_step); update_weights, the engine's own load (weight_update); sleep and wake_up,
           bytes over the bandwidth of pinned copies (train_step sleep)
30b-a3b    the same with adapters of all experts and linear layers in place of all weights, which stay in bfloat16
sources    steps that train while samples arrive (`streamed`), or sample one step ahead, beside synchronous ones, each a
           run, `--turns` times. Samples are ragged: one token in 400 ends one. The bound is `max(R, T)` and the rest of
           a synchronous step with a rollout of R and training of T seconds: no order of its work goes below it
steady     the quickstart in a size that SGLang's kernels take. Memory is that of the GPU which the run reports
           (`memory/...`, as the GPU's driver says), and after each step RssAnon of the run's processes and /dev/shm.
           Growth is the slope of a straight line through the steps that count, after those in which pools and caches
           fill up
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from benchmarks.report import Comparison, Number, Report, add_fields, arguments, changed, finish
from benchmarks.runs import LARGE, SMALL_SHAPE, TIMES, Ended, Watched, say_steps, sglang, shape_settings, value
from benchmarks.shapes import EXPERTS, SHAPES, tiny_shape

MIB = 2**20
UNTOLD = "cannot report what it has loaded"
METRICS = {  # of each step, with their units
    "rollout/response_length": "tokens",
    "perf/tokens_per_second": "tokens/s",
    "rollout/logprob_diff": "",
    "rollout/reward": "",
    "train/grad_norm": "",
}


@frozen(kw_only=True)
class Side:
    settings: Sequence[str] = ()
    left_out: tuple[int, int] = (
        0,
        0,
    )  # steps that do not count, at the start beside those of all sides, and at the end


@frozen(kw_only=True)
class Case:
    shape: str = ""  # of SHAPES, in bfloat16; else the quickstart's model
    prompts: int = 64
    samples: int = 8
    new: int = 512  # tokens of a sample
    ends_every: int = 0  # of so many tokens of the vocabulary one ends a sample; 0: a single one
    steps: int = 5  # that count
    warm: int = 3  # steps before them: kernels are compiled, memory is pinned
    memory: float = 0.5  # share of the GPU for the engine's weights and KV cache
    backend: str = "fsdp"
    ranks: int = 1
    replicas: int = 1
    tensor_parallel: int = 1  # devices of each engine
    bucket_mib: int = 0  # 0: as large as a run has them by itself
    micro_batch: int = 16384  # tokens
    settings: Sequence[str] = ()
    sides: Mapping[str, Side] = field(factory=lambda: {"": Side()})  # the others are divided by the first
    target: float | None = None  # of the second side's step
    growth: float | None = None  # MiB a step: memory is watched


SOURCES = {
    "synchronous": Side(),
    "streamed": Side(settings=("rollout.source=streamed",)),
    # Nothing was sampled ahead of the first step, whose update waits for what comes next, nor while the last trains.
    "one-step-off": Side(settings=("rollout.source=one-step-off",), left_out=(1, 1)),
}
CASES = {
    "0.6b": Case(shape="0.6b"),
    "8b": Case(shape="8b"),
    "30b-a3b": Case(
        shape="30b-a3b",
        ranks=2,
        replicas=2,
        memory=0.6,
        settings=(
            *('lora.targets=["all-linear", "experts"]', "lora.rank=8", "train.recompute=full"),
            # Of random weights: routers choose otherwise where scores are nearly equal, in 48 layers of bfloat16.
            "algorithm.on_mismatch=warn",
        ),
    ),
    "sources": Case(
        shape="0.6b",
        prompts=96,
        new=2048,
        ends_every=400,
        steps=3,
        warm=1,
        memory=0.8,
        settings=(
            # Log-probs are computed again, as is usual: with that, training takes more than half as long as sampling.
            *("cluster.placement=disaggregated", "algorithm.old_logprobs=recompute", "algorithm.overlong=keep"),
            *("algorithm.overlong_buffer=0", "algorithm.entropy_coef=0", "reward.name=benchmarks.grpo_step:low_half"),
            "train.optimizer.lr=1e-6",  # or lengths would not stay what they are
        ),
        sides=SOURCES,
        target=0.75,
    ),
    "steady": Case(
        new=7,
        steps=40,
        warm=10,
        memory=0.2,
        growth=1.0,
        settings=("weights.transport=ipc", "weights.verify_every=1", "cluster.offload=always"),
    ),
}
FIELDS = (
    *("backend", "ranks", "replicas", "tensor_parallel", "prompts", "samples", "new", "steps", "warm"),
    *("memory", "bucket_mib", "micro_batch"),
)
TINY: dict[str, Any] = {"prompts": 8, "samples": 4, "new": 7, "steps": 3, "warm": 1}


def low_half(prompt: object, response: str, *, tokens: Sequence[int], vocab: int) -> float:
    """A reward that random samples differ in: the share of tokens from the vocabulary's first half."""
    return sum(token < vocab // 2 for token in tokens) / max(1, len(tokens))


def settings(case: Case, side: Side, args: argparse.Namespace) -> list[str]:
    common = [
        *(f"backend.name={case.backend}", f"roles.actor.ranks={case.ranks}", f"rollout.replicas={case.replicas}"),
        *(f"rollout.prompts={case.prompts}", f"rollout.samples={case.samples}", f"rollout.max_tokens={case.new}"),
        *(f"run.steps={case.warm + case.steps + sum(side.left_out)}", "train.mini_batches=1", "eval.every=0"),
        *("checkpoint.every=0", "checkpoint.export=false", f"weights.bucket_bytes={case.bucket_mib * MIB}"),
        *(*case.settings, *side.settings),
    ]
    vocab = 16 if args.tiny or not case.shape else int(SHAPES[case.shape]["vocab_size"])
    common += [f"model.vocabulary={vocab}"]  # or none that the quickstart's tokenizer lacks would be sampled
    if case.ends_every:  # spread evenly; 2 is the tokenizer's own
        ends = [2, *range(case.ends_every, vocab, case.ends_every)]
        common += [f"model.config.eos_token_id={value(ends)}", f"reward.options.vocab={vocab}"]
    if args.tiny:
        apart = "cluster.placement=disaggregated" in case.settings
        fields = tiny_shape(SHAPES[case.shape]) if case.shape else {}
        experts = {name: fields[name] for name in ("model_type", *EXPERTS) if "num_experts" in fields}
        common += [f"model.config.{name}={value(each)}" for name, each in experts.items()]
        return [*common, "cluster.device=cpu", *([] if apart else ["cluster.offload=always"]), *args.set]
    # Larger batches than its CUDA graphs are decoded at half the speed. Of many, SGLang would capture graphs of 60
    # sizes, for a minute.
    rows = -(-case.prompts * case.samples // case.replicas)
    few = {"cuda_graph_bs_decode": [1, 2, 4, 8, 16, *range(32, rows, 64), rows]} if rows > 512 else {}
    return [
        *common,
        *(LARGE if case.backend == "fsdp" and case.shape else ()),
        *(
            shape_settings(case.shape, micro_batch=case.micro_batch)
            if case.shape
            else ("cluster.device=cuda", "train.precision=bfloat16", *SMALL_SHAPE)
        ),
        *sglang(
            memory=case.memory,
            tensor_parallel=case.tensor_parallel,
            attention_backend=os.environ.get("ATTENTION", "triton"),
            server={"cuda_graph_max_bs_decode": rows, **few},
        ),
        *args.set,
    ]


class Host:
    """Looks at a run's memory once a step: MiB that all its processes have for themselves, and what they share."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {"host, all processes": [], "/dev/shm": []}

    def __call__(self, run: Watched) -> None:
        if sum("time/step" in line for line in run.lines()) == len(self.seen["/dev/shm"]):
            return
        kib = 0
        for pid in run.processes():
            try:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            except OSError:  # it has ended meanwhile
                continue
            kib += sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
        free = os.statvfs("/dev/shm")
        for seen, mib in zip(
            self.seen.values(), (kib / 1024, (free.f_blocks - free.f_bfree) * free.f_frsize / MIB), strict=True
        ):
            seen.append(mib)

    def rows(self, ended: Ended, case: Case) -> list[Number]:
        """Of what counts: how it grows, as the slope of a straight line."""
        every = {what: values[case.warm :] for what, values in self.seen.items()}
        for name in sorted({each for step in ended.steps for each in step if each.startswith("memory/")}):
            every[name] = [1024 * step[name] for step in ended.steps[case.warm :] if name in step]
        rows = []
        for what, values in every.items():
            if len(values) > 1:
                slope = float(np.polyfit(np.arange(len(values)), values, 1)[0])
                rows.append(Number(what=f"{what}: in each step", values=values, unit="MiB"))
                rows.append(Number(what="its growth a step", values=[slope], unit="MiB", target=case.growth))
        verified = 0 if UNTOLD in " ".join(ended.output.split()) else len(ended.steps) + 1  # one before the first step
        return [*rows, Number(what="updates verified in the engine", values=[verified], unit="updates")]


# ---- what was found --------------------------------------------------------------------------------------------------


def report(
    case: Case, args: argparse.Namespace, found: Mapping[str, Sequence[Ended]], more: Sequence[Number], command: str
) -> Report:
    counted = {
        name: [
            step
            for ended in found[name]
            for step in ended.steps[case.warm + side.left_out[0] : len(ended.steps) - side.left_out[1]]
        ]
        for name, side in case.sides.items()
    }
    first = next(iter(case.sides))
    if not counted[first]:
        raise SystemExit("no step counts; see above")

    def values(name: str, of: str) -> list[float]:
        return [step.get(of, 0.0) for step in counted[name]]

    phases = sorted({each for step in counted[first] for each in step if each.startswith("time/")} - {"time/step"})
    limits = {f"time/{each.split('=')[0]}": float(each.split("=")[1]) for each in args.limit}
    if unknown := limits.keys() - set(phases):
        raise SystemExit(f"--limit: the run has no phase {sorted(unknown)[0]!r}; it has {', '.join(phases)}")
    whole, comparisons = values(first, "time/step"), []

    def compare(what: str, against: str, ours: Sequence[float], other: Sequence[float], target: float | None) -> None:
        pairs = list(zip(ours, other, strict=False))
        columns = {"ours": [pair[0] for pair in pairs], "other": [pair[1] for pair in pairs]}
        comparisons.extend([Comparison(what=what, against=against, target=target, **columns)] if pairs else [])

    for number, name in enumerate(case.sides):
        if number:
            compare(f"step, {name}", first, values(name, "time/step"), whole, case.target if number == 1 else None)
    if len(case.sides) > 1:
        trained = [sum(step.get(each, 0.0) for each in ("time/train", "time/forward")) for step in counted[first]]
        sampled = values(first, "time/rollout")
        bound = [all_ - min(pair) for all_, pair in zip(whole, zip(sampled, trained, strict=True), strict=True)]
        compare("bound of the step, max(R, T) and the rest", first, bound, whole, None)
    for each, limit in limits.items():
        compare(each.removeprefix("time/"), "its limit", values(first, each), [limit] * len(whole), None)
    if limits:
        compare("step", "sum of the limits", whole, [sum(limits.values())] * len(whole), None)
    return Report(
        name="grpo_step",
        size=f"{'tiny' if args.tiny else f'{case.shape} shape' if case.shape else 'small model'}, {case.prompts} x "
        f"{case.samples} samples, {case.ranks} {case.backend} ranks, {case.replicas} engines of {case.tensor_parallel}",
        comparisons=comparisons,
        numbers=[*(row for name in case.sides for row in rows_of(name, counted[name], found[name])), *more],
        note=f"`{command}`. The first {case.warm} steps of each run do not count; one optimizer step for each batch.",
    )


def rows_of(name: str, counted: Sequence[Mapping[str, float]], found: Sequence[Ended]) -> list[Number]:
    """Of one side: the step, its phases, and the most memory of all its steps."""
    rows: list[Number] = []

    def number(what: str, values: Sequence[float], unit: str) -> None:
        rows.extend([Number(what=f"{name}: {what}" if name else what, values=values, unit=unit)] if values else [])

    def seconds(of: str) -> list[float]:
        return [step.get(of, 0.0) for step in counted]

    total = seconds("time/step")
    times = {each for step in counted for each in step if TIMES.match(each)} - {"time/step"}
    number("step", total, "s")
    for each in sorted(times, key=lambda time: -sum(seconds(time))):
        number(f"in it: {each.removeprefix('time/')}", seconds(each), "s")
    phases = [seconds(each) for each in times if each.startswith("time/")]
    rest = [all_ - sum(parts) for all_, parts in zip(total, zip(*phases, strict=True), strict=True)]
    number("in it: the driver, between phases", rest, "s")
    for each, unit in METRICS.items():
        number(each, [step[each] for step in counted if each in step], unit)
    # Over all steps: none is told of later ones, where ranks and engines stay in memory.
    every = [step for ended in found for step in ended.steps]
    for each in sorted({name for step in every for name in step if name.startswith("memory/")}):
        what = each.removeprefix("memory/").removesuffix("_gib")
        number(f"most in use: {what}", [step[each] for step in every if each in step], "GiB")
    return rows


# ---- the program -----------------------------------------------------------------------------------------------------


def measure(case: Case, args: argparse.Namespace, directory: Path) -> int:
    found: dict[str, list[Ended]] = {name: [] for name in case.sides}
    more: list[Number] = []
    good = True
    for turn in range(args.turns):
        for name in list(case.sides)[:: 1 if turn % 2 == 0 else -1]:
            place = directory / f"{turn}-{name}"
            with Watched(*settings(case, case.sides[name], args), directory=place) as run:
                host = Host()
                ended = run.wait(args.deadline, host if case.growth else lambda _: None)
            more = host.rows(ended, case) if case.growth else []
            found[name].append(ended)
            good = good and ended.status == 0
            if len(case.sides) > 1 or ended.status != 0:
                print(name)
                say_steps(ended, well=ended.status == 0)
    finish(report(case, args, found, more, run.command), args.output)
    return int(not good)


def main() -> int:
    command = arguments(__doc__, deadline=500.0, settings="more settings of the runs")
    command.add_argument("case", choices=CASES)
    command.add_argument("--turns", type=int, default=1, help="runs of each side")
    add_fields(command, Case, *FIELDS)
    command.add_argument("--limit", nargs="*", default=[], metavar="PHASE=SECONDS")
    args = command.parse_args()
    case = changed(evolve(CASES[args.case], **(TINY if args.tiny else {})), command, args)
    with tempfile.TemporaryDirectory(prefix="grpo-") as directory:
        return measure(case, args, Path(directory))


if __name__ == "__main__":
    raise SystemExit(main())
