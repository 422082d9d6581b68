"""Measure an optimizer step of a backend against a bare loop, or against the same backend with other options.

python -m benchmarks.train_step fsdp megatron deepspeed-stage3 --output found/steps.json
python -m benchmarks.train_step megatron-tp2-dp2 --sleep --set overlap_grad_reduce=true
python -m benchmarks.train_step fsdp-cpu                           # on two CPU cores

Each case of `CASES` is one or more sides, the first of which the others are divided by. The sides take turns in one
process per GPU; if a case is `apart`, or with `--apart`, each has processes of its own, one side after the other,
`--turns` times. The time is that of one step from micro-batches on the host: forward, clipped loss over per-token
log-probs, backward, clipping, AdamW. The plugin's side goes through the worker's host, with metrics; a bare loop
(`bare`) computes none but the gradient's norm. If the norms of the first gradients differ, the benchmark fails. `steps`
defines FLOPs and MFU. With `--sleep` the plugin sleeps and wakes up too, with all kinds of memory, beside copies of as
many bytes to pinned memory and back; the case `sleep` has 50 GB of them, and needs as much host memory.

The file is written again after each start, so that a command which is cut off leaves what it found; a side that fails
is reported, and the next one is measured. `--tiny` runs any case on a CPU, to see that it works.

Host memory of the 4B shape (`deepspeed-offload`), in bytes per parameter: 18 pinned, that is 72 GB, and 4 more until
there are moments. That fits into 128 GiB once, not twice.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, evolve, field, frozen

from benchmarks import shapes
from benchmarks.bare import BARE
from benchmarks.report import DIFFERENT, Comparison, Number, Report, add_fields, arguments, changed, tell
from benchmarks.steps import (
    GIB,
    PEAK,
    Plugin,
    Work,
    allocated,
    device_of,
    facts,
    flops,
    in_ranks,
    join,
    packed_batch,
    timed,
)
from corerl.types import MemoryKind, PackedBatch

TARGET = round(1 / 0.97, 3)  # of a bare loop's seconds on a GPU
COPIES = (1.111, 1.176)  # of the seconds of pinned copies: 0.9 of their bandwidth to the host, 0.85 back
RAW = 4 * GIB  # bytes of one large copy
WARM_UP = 2  # steps of each side before any is measured
PACKAGES = ("transformers", "triton", "megatron-core", "transformer_engine", "deepspeed")


@frozen(kw_only=True)
class Case:
    sides: Mapping[str, Work]  # the first is what the others are compared with
    target: float | None = None
    apart: bool = False  # each side in processes of its own
    entropy: bool = False

    @property
    def plugin(self) -> Work:
        """The work of the plugin, or of the first of several."""
        return next(work for work in self.sides.values() if work.loop == "plugin")

    def each(self, change: Callable[[Work], Work]) -> Case:
        return evolve(self, sides={name: change(work) for name, work in self.sides.items()})


def against_bare(work: Work, *, apart: bool = False) -> Case:
    return Case(sides={"a bare loop": evolve(work, loop="bare"), "the plugin": work}, target=TARGET, apart=apart)


def alone(work: Work) -> Case:
    return Case(sides={"the plugin": work})


def compiled(on: bool) -> dict[str, Any]:
    return {"options": {"compile": on}}


def ragged(what: str, fields: Mapping[str, Any], samples: int, shortest: int, longest: int, **more: Any) -> Work:
    lengths = np.random.default_rng(0).integers(shortest, longest + 1, samples)
    return Work(what=what, fields=fields, lengths=tuple(map(int, lengths)), **{"tokens": 16384, **more})


def fsdp_cpu(what: str, fields: Mapping[str, Any], tokens: int, samples: tuple[int, int, int]) -> Case:
    work = ragged(what, fields, *samples, ranks=2, device="cpu", precision="float32", tokens=tokens)
    sides = {"a bare loop": evolve(work, loop="packed"), "the plugin": work}
    return Case(sides=sides, target=1.1, entropy=True)


def backends(work: Work) -> Case:
    return Case(
        sides={
            "FSDP, compiled": evolve(work, **compiled(True)),
            "FSDP": evolve(work, **compiled(False)),
            "Megatron in plain torch": evolve(work, backend="megatron", options={"transformer": "torch"}),
        },
        apart=True,
    )


def prefixes(what: str, fields: Mapping[str, Any], groups: int, prompt: int, answer: int, target: float) -> Case:
    """Groups of 16 samples of one prompt, on one GPU: each sample by itself, and prompts once."""
    lengths = (prompt + answer,) * 16 * groups
    text = f"{what}, compiled, {groups} x 16 samples, {prompt} + {answer} tokens"
    work = Work(what=text, fields=fields, lengths=lengths, group=16, prompt=prompt, tokens=16384, **compiled(True))
    sides = {"each sample by itself": work, "prompts once": evolve(work, share_prefixes=True)}
    return Case(sides=sides, target=target, apart=True)


def megatron(
    what: str, ranks: int, fields: Mapping[str, Any] = shapes.QWEN3_8B, micro: int = 4, **options: Any
) -> Work:
    return Work(what=what, fields=fields, backend="megatron", ranks=ranks, options=options, micro_batches=micro)


def experts(ranks: int, layers: int) -> Work:
    fields = {**shapes.QWEN3_30B_A3B, "num_hidden_layers": layers}
    what = f"{layers} layers of 30B-A3B, ep={ranks}, dp={ranks}"
    return megatron(what, ranks, fields, micro=2, expert_parallel=ranks)


def long(ranks: int) -> Work:
    what = "8B shape, cp=2, a sequence of 32k a micro-batch, layers recomputed"
    return evolve(megatron(what, ranks, micro=2, context_parallel=2), recompute="full", sequence=32768, tokens=32768)


def deepspeed(what: str, fields: Mapping[str, Any], **options: Any) -> Work:
    return Work(what=what, fields=fields, backend="deepspeed", options=options)


FSDP = Work(
    what="8 layers of the 8B shape, compiled", fields=shapes.SLICE, tokens=16384, micro_batches=1, **compiled(True)
)
MOE = evolve(FSDP, what="8 layers of 30B-A3B", fields={**shapes.QWEN3_30B_A3B, "num_hidden_layers": 8})
MOE = evolve(MOE, options={**FSDP.options, "reshard_after_forward": False})  # there is memory for it
FSDP_SMALL = evolve(FSDP, what="0.6B shape, compiled", fields=shapes.QWEN3_600M, sequence=512, micro_batches=4)
SMOLLM2 = ragged("SmolLM2-135M, 512 samples", shapes.SMOLLM2_135M, 512, 100, 200)
MEGATRON = megatron("8 layers of the 8B shape", 1, shapes.SLICE, micro=2)
BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
SPLIT: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True}
STAGES: dict[str, Any] = {"pipeline_parallel": 2}
OFFLOAD = deepspeed("4B shape, stage 2, optimizer on the host", shapes.QWEN3_4B, stage=2, offload="optimizer")
ZERO3 = evolve(deepspeed("8B shape, stage 3", shapes.QWEN3_8B, stage=3), tokens=4096, micro_batches=4)

CASES: Mapping[str, Case] = {
    "fsdp": against_bare(FSDP),
    "fsdp-0.6b": against_bare(FSDP_SMALL),
    # Neither side's float32 weights, gradients and moments leave room for the other's.
    "fsdp-experts": against_bare(MOE, apart=True),
    "sleep": alone(evolve(FSDP, what="15 layers of the 8B shape", fields={**shapes.QWEN3_8B, "num_hidden_layers": 15})),
    "fsdp-cpu": fsdp_cpu("the quickstart's model (0.1 M parameters)", shapes.QUICKSTART, 16384, (256, 12, 14)),
    "fsdp-cpu-4m": fsdp_cpu("4 M parameters, ragged samples, 2 micro-batches", shapes.QWEN3_4M, 1024, (26, 32, 192)),
    "megatron": against_bare(MEGATRON),
    "megatron-fp8": against_bare(evolve(MEGATRON, what="FP8 e4m3 by blocks", options=BLOCKWISE)),
    "megatron-torch": alone(evolve(MEGATRON, what="no TransformerEngine", options={"transformer": "torch"})),
    "megatron-experts": alone(evolve(MOE, backend="megatron", options={})),  # beside fsdp-experts
    "megatron-tp2": alone(megatron("8B shape, tp=2 with sequence parallel", 2, **SPLIT)),
    "megatron-pp2": alone(megatron("8B shape, pp=2", 2, micro=8, **STAGES)),
    "megatron-cp2": alone(long(2)),
    "megatron-ep2": alone(experts(2, layers=8)),
    "megatron-tp2-dp2": alone(megatron("8B shape, tp=2 with sequence parallel, dp=2", 4, **SPLIT)),
    "megatron-tp2-pp2": alone(megatron("8B shape, tp=2, pp=2", 4, micro=8, **SPLIT, **STAGES)),
    "megatron-cp2-dp2": alone(long(4)),
    "megatron-ep4": alone(experts(4, layers=16)),
    "deepspeed-stage2": against_bare(deepspeed("8 layers of the 8B shape, stage 2", shapes.SLICE, stage=2)),
    "deepspeed-stage3": against_bare(deepspeed("8 layers of the 8B shape, stage 3", shapes.SLICE, stage=3)),
    "deepspeed-offload": against_bare(OFFLOAD, apart=True),
    "deepspeed-8b": against_bare(evolve(ZERO3, ranks=4)),
    "deepspeed-8b-2": against_bare(evolve(ZERO3, ranks=2), apart=True),
    # Megatron without TransformerEngine.
    "smollm2": backends(SMOLLM2),
    "0.6b": backends(ragged("0.6B shape, 16k tokens", shapes.QWEN3_600M, 108, 100, 200)),
    "prefixes": prefixes("0.6B shape", shapes.QWEN3_600M, groups=4, prompt=2048, answer=256, target=0.4),
    "prefixes-8b": prefixes("8 layers of the 8B shape", shapes.SLICE, groups=4, prompt=2048, answer=256, target=0.4),
    "prefixes-short": prefixes("0.6B shape", shapes.QWEN3_600M, groups=2, prompt=256, answer=2048, target=1.0),
}


# ---- on the ranks ----------------------------------------------------------------------------------------------------


@define
class Side:
    """What one side did in one start. Seconds and GiB."""

    seconds: list[float] = field(factory=list)  # of each measured step
    norms: list[float] = field(factory=list)  # of every step's gradient, warm-up included
    peaks: list[float] = field(factory=list)  # by rank: the most in a measured step, without what other sides hold
    held: float = 0.0  # between steps, on the first rank
    retries: int = 0  # times that torch's allocator gave memory back to get other memory, in all steps
    sleeps: list[list[float]] = field(factory=list)  # of each: seconds, GiB freed, GiB left, seconds to wake
    copies: list[float] = field(factory=list)  # seconds to copy as many bytes to pinned memory, and back
    tokens: int = 0  # of a step, on all ranks
    flops: float = 0.0  # of a step


class Running:
    """One side in this process."""

    def __init__(self, work: Work, case: Case, plugin: Plugin | None) -> None:
        self.found = Side()
        self.device = device_of(work)
        self.held = 0  # bytes of the device
        self._entropy, self._peaks = case.entropy, dict[str, float]()
        with self._counted():
            if work.loop == "plugin":
                self.loop: Any = Plugin(work)
                self._batch: PackedBatch = self.loop.batch
            else:
                self.loop = BARE[work.backend](work, self.device, plugin)
                self._batch = packed_batch(work, dp_rank=dist.get_rank(), dp_size=dist.get_world_size())
        lengths = work.samples(self.loop.layout.dp_size if work.loop == "plugin" else dist.get_world_size())
        self.found.tokens = int(lengths.sum())
        # The formula does not know windows, nor layers with a state, nor tokens that pass once for several samples.
        unknown = work.share_prefixes or "layer_types" in work.fields
        self.found.flops = 0.0 if unknown else flops(work.fields, lengths)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        before = allocated(self.device)
        yield
        self.held += allocated(self.device) - before

    def warm_up(self, *, sleep: bool) -> None:
        with self._counted():
            for _ in range(WARM_UP):
                self.step()
            if sleep and isinstance(self.loop, Plugin):
                self.found.sleeps = [self._sleep() for _ in range(4)]  # the first one pins host memory
                self.found.copies = copies(self.device, self.loop.worker.backend.sleeping_bytes())
                self.step()
        self._peaks.clear()

    def step(self) -> float:
        def train() -> None:
            self.found.norms.append(self.loop.train(self._batch, entropy=self._entropy))

        return timed(self.device, train, self._peaks, "step")

    def _sleep(self) -> list[float]:
        worker, kinds, slept = self.loop.worker, frozenset(MemoryKind), []
        down = timed(self.device, lambda: slept.append(worker.sleep(kinds)))
        up = timed(self.device, lambda: worker.wake_up(kinds))
        return [down, slept[0].freed_bytes / GIB, slept[0].residual_bytes / GIB, up]

    def end(self, *, total: int) -> Side:
        """`total`: bytes that all sides hold between steps."""
        own = (self._peaks.get("step", 0.0) - total + self.held) / GIB if self.held else 0.0
        self.found.peaks = [own] * dist.get_world_size()
        dist.all_gather_object(self.found.peaks, own)
        self.found.held = self.held / GIB
        if self.device.type == "cuda":
            self.found.retries = torch.cuda.memory_stats(self.device)["num_alloc_retries"]
        self.loop.close()
        return self.found


def measure(case: Case, rounds: int, sleep: bool, profile: bool) -> tuple[dict[str, Side], dict[str, str]]:
    """Called on every rank; the first one's result counts. What each side did, and versions."""
    first = next(iter(case.sides.values()))
    join(first)
    before = allocated(device_of(first))
    running: dict[str, Running] = {}
    # The plugin comes first: a bare loop may need its process groups, and weights that are not trained yet.
    for name, work in sorted(case.sides.items(), key=lambda side: side[1].loop != "plugin"):
        plugins = [each.loop for each in running.values() if isinstance(each.loop, Plugin)]
        running[name] = Running(work, case, next(iter(plugins), None))
    for each in running.values():
        each.warm_up(sleep=sleep)
    names = list(running)
    for number in range(rounds):
        turn = number % len(names)  # what comes first changes
        for name in names[turn:] + names[:turn]:
            running[name].found.seconds.append(running[name].step())
    for name in names if profile else ():
        print(f"{name}\n{kernels(running[name])}", flush=True)
    total = before + sum(each.held for each in running.values())
    found = {name: running[name].end(total=total) for name in reversed(running)}
    gc.collect()
    return found, {**facts(first, *PACKAGES), "threads": str(torch.get_num_threads())}


def kernels(side: Running) -> str:
    """What the device does in one step, the longest first, as a table."""
    on_gpu, activity = side.device.type == "cuda", torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profile:
        side.step()
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return str(profile.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=80))


def copies(device: torch.device, nbytes: int) -> list[float]:
    """Seconds to pinned memory and back, of as many bytes: the best of four of one large copy each way."""
    if device.type == "cpu":
        return []
    there = torch.empty(min(nbytes, RAW), dtype=torch.uint8, device=device)
    host = torch.empty_like(there, device="cpu", pin_memory=True)
    ways = ((host, there), (there, host))
    best = [min(timed(device, partial(to.copy_, of, non_blocking=True)) for _ in range(4)) for to, of in ways]
    return [seconds * nbytes / there.nbytes for seconds in best]


# ---- what was found --------------------------------------------------------------------------------------------------


def report(name: str, case: Case, starts: Mapping[str, Sequence[Side]], versions: Mapping[str, str]) -> Report:
    """Of one case; of each side what it did in its starts so far."""
    seconds = {side: [each for start in found for each in start.seconds] for side, found in starts.items()}
    base, comparisons = next(iter(case.sides)), []
    numbers: list[Number] = []
    for side in case.sides:
        if not (found := starts.get(side)):
            continue
        if side != base and seconds.get(base):
            rounds = min(len(seconds[side]), len(seconds[base]))
            target = case.target if case.sides[side].loop == "plugin" else None
            what = f"{name}, {side}: a step of {found[0].tokens} tokens"
            ours, other = seconds[side][:rounds], seconds[base][:rounds]
            comparisons.append(Comparison(what=what, against=base, ours=ours, other=other, target=target))
        number = partial(_number, numbers, f"{name}, {side}")
        number("a step", seconds[side], "s")
        number("tokens a second", [found[0].tokens / each / 1e3 for each in seconds[side]], "k")
        if case.plugin.device == "cuda":
            mfu = [100 * found[0].flops / each / case.plugin.ranks / PEAK for each in seconds[side]]
            number("MFU", mfu if found[0].flops else [], "%")
            number("peak of each GPU", [each for start in found for each in start.peaks], "GiB")
            number("between steps", [start.held for start in found], "GiB")
            number("retries of the allocator", [start.retries for start in found], "")
        slept = [start for start in found if start.sleeps]
        number("the first sleep, which pins host memory", [start.sleeps[0][0] for start in slept], "s")
        for part, unit, words in ((0, "s", "sleep"), (3, "s", "wake up"), (1, "GiB", "freed"), (2, "GiB", "left")):
            number(words, [each[part] for start in slept for each in start.sleeps[1:]], unit)
        for way, (part, words) in enumerate(((0, "sleep"), (3, "wake up"))):
            pairs = [(each[part], start.copies[way]) for start in slept if start.copies for each in start.sleeps[1:]]
            if pairs:
                ours, other = (list(each) for each in zip(*pairs, strict=True))
                what, against = f"{name}, {side}: {words}", "pinned copies of the bytes"
                comparisons.append(Comparison(what=what, against=against, ours=ours, other=other, target=COPIES[way]))
    notes = [f"{case.plugin.what}."]
    if norms := {side: found[0].norms for side, found in starts.items() if found}:
        listed = (f"{side} " + " ".join(f"{norm:.5g}" for norm in each[:3]) for side, each in norms.items())
        notes.append(f"Norms of the first gradients: {'; '.join(listed)}.")
    notes += [DIFFERENT] if differ(case, norms) else []
    work = case.plugin
    batch = f"{len(work.lengths)} samples" if work.lengths else f"{work.micro_batches} micro-batches on each dp rank"
    size = f"{work.ranks} ranks, {batch}, {work.tokens} tokens a micro-batch, recompute {work.recompute}"
    return Report(
        name=name,
        size=f"{name}: {size}",
        comparisons=comparisons,
        numbers=numbers,
        note=f"{name}: {' '.join(notes)}",
        versions=versions,
    )


def _number(into: list[Number], who: str, what: str, values: Sequence[float], unit: str) -> None:
    if values:
        into.append(Number(what=f"{who}: {what}", values=values, unit=unit))


def differ(case: Case, norms: Mapping[str, Sequence[float]]) -> bool:
    """Whether sides that do the same work have other first gradients. What they round grows from step to step."""
    exact = all(work.precision == "float32" for work in case.sides.values())
    first = next(iter(norms.values()), [])[:2]
    return not all(np.allclose(each[:2], first, rtol=1e-3 if exact else 5e-2) for each in norms.values())


# ---- the program -----------------------------------------------------------------------------------------------------


def as_asked(case: Case, command: argparse.ArgumentParser, args: argparse.Namespace) -> Case:
    """As the command line says."""
    options = tomllib.loads("\n".join(args.set))
    case = case.each(lambda work: evolve(changed(work, command, args), options={**work.options, **options}))
    case = evolve(case, apart=args.apart or case.apart, entropy=args.entropy or case.entropy)
    return case.each(lambda work: work.tiny) if args.tiny else case


def starts_of(case: Case, turns: int) -> list[Case]:
    """What is started one after the other; who comes first changes every turn."""
    if not case.apart or len(case.sides) == 1:
        return [case]
    one = [evolve(case, sides={name: work}) for name, work in case.sides.items()]
    return [each for turn in range(turns) for each in (one if turn % 2 == 0 else one[::-1])]


def main() -> None:
    parser = arguments(__doc__, rounds=6, settings="options of all sides")
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--turns", type=int, default=2, help="starts of each side where they are apart (default: 2)")
    parser.add_argument("--apart", action="store_true", help="the sides one after the other, for less memory")
    parser.add_argument("--entropy", action="store_true", help="the loss has an entropy bonus")
    add_fields(parser, Work, "tokens", "micro_batches", "recompute", "precision")
    parser.add_argument("--sleep", action="store_true", help="the plugin sleeps, before the last warm-up step")
    parser.add_argument("--profile", action="store_true", help="print the operations of one more step of each side")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds that one start may take (default: 400)")
    args = parser.parse_args()
    reports: dict[str, Report] = {}
    failed: list[str] = []
    versions: dict[str, str] = {}
    for name in args.cases:
        case = as_asked(CASES[name], parser, args)
        starts: dict[str, list[Side]] = {}
        for start in starts_of(case, args.turns):
            how = (start, args.rounds, args.sleep or name == "sleep", args.profile)
            work = next((each for each in start.sides.values() if each.loop == "plugin"), case.plugin)
            try:
                found, known = in_ranks("benchmarks.train_step:measure", *how, work=work, limit=args.limit)
            except RuntimeError as error:
                failed.append(f"{name}, {' and '.join(start.sides)}: {error}")
                continue
            versions |= known
            for side, each in found.items():
                starts.setdefault(side, []).append(each)
            reports[name] = report(name, case, starts, versions)
            tell("train_step", list(reports.values()), args.output)
    different = [f"{name}: {DIFFERENT}" for name, each in reports.items() if DIFFERENT in each.note]
    if failed or different:
        sys.exit("; ".join([*failed, *different]))


if __name__ == "__main__":
    from benchmarks import train_step  # not as __main__: what ranks get is pickled with the name of its module

    train_step.main()
