"""Measure an optimizer step of a backend against a bare loop, or against the same backend with other options.

python -m benchmarks.train_step fsdp megatron deepspeed-stage3 --output found/steps.json
python -m benchmarks.train_step fsdp --lora 32                     # the other side passes with all weights frozen
python -m benchmarks.train_step megatron-tp2-dp2 --update --sleep --set overlap_grad_reduce=true
python -m benchmarks.train_step fsdp-cpu                           # on two CPU cores

Each case of `CASES` is one or more sides, the first of which the others are divided by. The sides take turns in one
process per GPU; if a case is `apart`, or with `--apart`, each has processes of its own, one side after the other,
`--turns` times. The time is that of one step from micro-batches on the host: forward, clipped loss over per-token
log-probs, backward, clipping, AdamW. The plugin's side goes through the worker's host, with metrics; a bare loop
(bare_BACKEND.py) computes none but the gradient's norm. If the norms of the first gradients differ, the benchmark
fails. `steps` defines FLOPs and MFU.

The file is written again after each start, so that a command which is cut off leaves what it found; a side that fails
is reported, and the next one is measured. `--tiny` runs any case on a CPU, to see that it works.

Host memory of the 4B shape (`deepspeed-offload`), in bytes per parameter: with stage 2, 18 pinned, that is 72 GB, and 4
more until there are moments; with stage 3 20.3, that is 81 GB. Either fits into 128 GiB once, not twice.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, evolve, field, frozen
from torch import Tensor

from benchmarks.report import DIFFERENT, Comparison, Number, Report, arguments, finish, joined, table
from benchmarks.shapes import (
    GEMMA3_1B,
    GPT_OSS_SLICE,
    QUICKSTART,
    QWEN3_4B,
    QWEN3_4M,
    QWEN3_5_SLICE,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_600M,
    SLICE,
    SMOLLM2_135M,
)
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
from corerl.config import LoraConfig
from corerl.models import attention
from corerl.ops import PackedSequences, packed_attention
from corerl.types import MemoryKind, PackedBatch
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import Address, WeightSender

TARGET = round(1 / 0.97, 3)  # of a bare loop's seconds on a GPU
WARM_UP = 2  # steps of each side before any is measured
PACKAGES = ("transformers", "triton", "megatron-core", "transformer_engine", "deepspeed")


@frozen(kw_only=True)
class Case:
    sides: Mapping[str, Work]  # the first is what the others are compared with
    target: float | None = None
    apart: bool = False  # each side in processes of its own
    entropy: bool = False
    same: bool = True  # whether all sides compute the same gradient
    changed: Mapping[str, Mapping[str, float]] = field(factory=dict)  # by side, see `attention_with`

    @property
    def plugin(self) -> Work:
        """The work of the plugin, or of the first of several."""
        return next(work for work in self.sides.values() if work.loop == "plugin")

    def each(self, change: Callable[[Work], Work]) -> Case:
        return evolve(self, sides={name: change(work) for name, work in self.sides.items()})


def against_bare(work: Work, *, apart: bool = False, target: float | None = TARGET, **bare: Any) -> Case:
    """`bare`: options of the bare loop, added to the plugin's."""
    loop = evolve(work, loop="bare", options={**work.options, **bare})
    return Case(sides={"a bare loop": loop, "the plugin": work}, target=target, apart=apart)


def alone(work: Work) -> Case:
    return Case(sides={"the plugin": work})


def compiled(on: bool) -> dict[str, Any]:
    return {"options": {"compile": on}}


def ragged(what: str, fields: Mapping[str, Any], samples: int, shortest: int, longest: int, **more: Any) -> Work:
    lengths = np.random.default_rng(0).integers(shortest, longest + 1, samples)
    return Work(what=what, fields=fields, lengths=tuple(map(int, lengths)), **{"tokens": 16384, **more})


def fsdp_cpu(what: str, fields: Mapping[str, Any], tokens: int, samples: tuple[int, int, int]) -> Case:
    work = ragged(what, fields, *samples, ranks=2, device="cpu", precision="float32", tokens=tokens)
    bare = {
        "a bare loop": evolve(work, loop="packed"),
        "plain transformers on padded rows": evolve(work, loop="padded"),
    }
    return Case(sides={**bare, "the plugin": work}, target=1.1, entropy=True)


def layouts(what: str, fields: Mapping[str, Any], **more: Any) -> Case:
    work = ragged(
        what, fields, recompute="full", **{"samples": 48, "shortest": 256, "longest": 2048, "tokens": 8192, **more}
    )
    work = evolve(work, options={"compile": False})
    sides = {name: evolve(work, layout=name) for name in ("packed", "whole")}
    return Case(sides={"plain transformers on padded rows": evolve(work, loop="padded"), **sides}, apart=True)


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


def attending(**extra: float) -> Case:
    """8 layers of the 0.6B shape, without and with sinks or capped scores."""
    sides = {"without": EIGHT, "with": EIGHT}
    return Case(sides=sides, apart=True, same=False, changed={"with": extra})


def megatron(what: str, ranks: int, fields: Mapping[str, Any] = QWEN3_8B, micro: int = 4, **options: Any) -> Work:
    return Work(what=what, fields=fields, backend="megatron", ranks=ranks, options=options, micro_batches=micro)


def experts(ranks: int, layers: int) -> Work:
    fields = {**QWEN3_30B_A3B, "num_hidden_layers": layers}
    what = f"{layers} layers of 30B-A3B, ep={ranks}, dp={ranks}"
    return megatron(what, ranks, fields, micro=2, expert_parallel=ranks)


def fsdp_experts(**more: Any) -> Work:
    fields = {**QWEN3_30B_A3B, "num_hidden_layers": 8}
    return evolve(FSDP, what="8 layers of 30B-A3B", fields=fields, **more)


def long(ranks: int) -> Work:
    what = "8B shape, cp=2, a sequence of 32k a micro-batch, layers recomputed"
    return evolve(megatron(what, ranks, micro=2, context_parallel=2), recompute="full", sequence=32768, tokens=32768)


def deepspeed(what: str, fields: Mapping[str, Any], **options: Any) -> Work:
    return Work(what=what, fields=fields, backend="deepspeed", options=options)


FSDP = Work(what="8 layers of the 8B shape, compiled", fields=SLICE, tokens=16384, micro_batches=1, **compiled(True))
FSDP_SMALL = evolve(FSDP, what="0.6B shape, compiled", fields=QWEN3_600M, sequence=512, micro_batches=4)
EIGHT_LAYERS = {**QWEN3_600M, "num_hidden_layers": 8}
EIGHT = evolve(FSDP_SMALL, what="8 layers of the 0.6B shape", fields=EIGHT_LAYERS, micro_batches=1, **compiled(False))
WIDE = {**EIGHT_LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 320}
NARROW = {**EIGHT_LAYERS, "num_attention_heads": 20, "num_key_value_heads": 10}
SMOLLM2 = ragged("SmolLM2-135M, 512 samples", SMOLLM2_135M, 512, 100, 200)
MEGATRON = megatron("8 layers of the 8B shape", 1, SLICE, micro=2)
BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed"}
SPLIT: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True}
STAGES: dict[str, Any] = {"pipeline_parallel": 2}
OFFLOAD = deepspeed("4B shape, stage 2, optimizer on the host", QWEN3_4B, stage=2, offload="optimizer")
ZERO3 = evolve(deepspeed("8B shape, stage 3", QWEN3_8B, stage=3), tokens=4096, micro_batches=4)

CASES: Mapping[str, Case] = {
    "fsdp": against_bare(FSDP),
    "fsdp-0.6b": against_bare(FSDP_SMALL),
    # Neither side's float32 weights, gradients and moments leave room for the other's.
    "fsdp-experts": against_bare(fsdp_experts(), apart=True),
    "fsdp-experts-plain": against_bare(fsdp_experts(**compiled(False)), apart=True),
    "fsdp-cpu": fsdp_cpu("the quickstart's model (0.1 M parameters)", QUICKSTART, 16384, (256, 12, 14)),
    "fsdp-cpu-4m": fsdp_cpu("4 M parameters, ragged samples, 2 micro-batches", QWEN3_4M, 1024, (26, 32, 192)),
    "megatron": against_bare(MEGATRON),
    "megatron-16k": against_bare(evolve(MEGATRON, tokens=16384, micro_batches=1)),
    # What Megatron can fuse beyond what the plugin asks for; it compiles this with torch.compile.
    "megatron-fused": against_bare(MEGATRON, bias_dropout_fusion=True),
    "megatron-fp8": against_bare(evolve(MEGATRON, what="FP8 e4m3 by blocks", options=BLOCKWISE)),
    "megatron-fp8-delayed": against_bare(evolve(MEGATRON, what="FP8 hybrid, delayed scales", options=DELAYED)),
    "megatron-torch": alone(evolve(MEGATRON, what="no TransformerEngine", options={"transformer": "torch"})),
    "megatron-tp2": alone(megatron("8B shape, tp=2 with sequence parallel", 2, **SPLIT)),
    "megatron-pp2": alone(megatron("8B shape, pp=2", 2, micro=8, **STAGES)),
    "megatron-cp2": alone(long(2)),
    "megatron-ep2": alone(experts(2, layers=8)),
    "megatron-tp2-dp2": alone(megatron("8B shape, tp=2 with sequence parallel, dp=2", 4, **SPLIT)),
    "megatron-tp2-pp2": alone(megatron("8B shape, tp=2, pp=2", 4, micro=8, **SPLIT, **STAGES)),
    "megatron-tp2-pp2-vpp2": alone(
        megatron("8B shape, tp=2, pp=2 in two parts each", 4, micro=8, **SPLIT, **STAGES, virtual_pipeline=2)
    ),
    "megatron-cp2-dp2": alone(long(4)),
    "megatron-ep4": alone(experts(4, layers=16)),
    "deepspeed-stage2": against_bare(deepspeed("8 layers of the 8B shape, stage 2", SLICE, stage=2)),
    "deepspeed-stage3": against_bare(deepspeed("8 layers of the 8B shape, stage 3", SLICE, stage=3)),
    "deepspeed-offload": against_bare(OFFLOAD, apart=True),
    "deepspeed-offload-stage3": against_bare(
        evolve(OFFLOAD, what="4B shape, stage 3, optimizer on the host", options={**OFFLOAD.options, "stage": 3}),
        apart=True,
    ),
    "deepspeed-offload-cpu-adam": against_bare(OFFLOAD, apart=True, cpu_adam=True),
    "deepspeed-8b": against_bare(evolve(ZERO3, ranks=4)),
    "deepspeed-8b-2": against_bare(evolve(ZERO3, ranks=2), apart=True),
    # What slow paths cost (docs/models.md).
    "smollm2": backends(SMOLLM2),
    "0.6b": backends(ragged("0.6B shape, 16k tokens", QWEN3_600M, 108, 100, 200)),
    "float32": Case(
        sides={
            "bfloat16, compiled": evolve(SMOLLM2, **compiled(True)),
            "float32, as `auto` has it": evolve(SMOLLM2, precision="float32", **compiled(False)),
            "float32, compiled around attention": evolve(SMOLLM2, precision="float32", **compiled(True)),
        },
        apart=True,
    ),
    "heads": Case(
        sides={
            "20 heads of 128": evolve(EIGHT, fields=NARROW),
            "20 heads of 128, compiled": evolve(EIGHT, fields=NARROW, **compiled(True)),
            "8 heads of 320": evolve(EIGHT, fields=WIDE),
            "8 heads of 320, compiled around attention": evolve(EIGHT, fields=WIDE, **compiled(True)),
        },
        apart=True,
        same=False,
    ),
    "prefixes": prefixes("0.6B shape", QWEN3_600M, groups=4, prompt=2048, answer=256, target=0.4),
    "prefixes-8b": prefixes("8 layers of the 8B shape", SLICE, groups=4, prompt=2048, answer=256, target=0.4),
    "prefixes-short": prefixes("0.6B shape", QWEN3_600M, groups=2, prompt=256, answer=2048, target=1.0),
    "sinks": attending(sink=0.0),  # the score of each head's
    "caps": attending(softcap=50.0),  # of scores, as Gemma 2 has it
    "gemma3": layouts("Gemma 3 1B", GEMMA3_1B),
    "qwen3.5": layouts("8 layers of Qwen3.5 0.8B", QWEN3_5_SLICE, samples=16, shortest=128, longest=1024),
    "gpt-oss": layouts("8 layers of GPT-OSS with 8 experts", GPT_OSS_SLICE),
}


# ---- on the ranks ----------------------------------------------------------------------------------------------------


@define
class Side:
    """What one side did in one start. Seconds and GiB."""

    seconds: list[float] = field(factory=list)  # of each measured step
    norms: list[float] = field(factory=list)  # of every step's gradient, warm-up included
    peaks: list[float] = field(factory=list)  # by rank: the most in a measured step, without what other sides hold
    held: float = 0.0  # between steps, on the first rank
    host: float = 0.0  # that the host had less of after the steps, where the side is alone
    sleeps: list[list[float]] = field(factory=list)  # of each: seconds, GiB freed, GiB left, seconds to wake
    updates: list[float] = field(factory=list)  # of each gather of all weights to the first rank
    tokens: int = 0  # of a step, on all ranks
    flops: float = 0.0  # of a step


NOBODY = Address(transport="nowhere", engines=())


class Nowhere(WeightSender):
    """The first rank gathers every bucket, and no engine takes it."""

    def open(self, manifest: Manifest, version: int) -> None: ...

    def send(self, bucket: Bucket, flat: Tensor) -> None: ...

    def finish(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None: ...


@contextmanager
def attention_with(extra: Mapping[str, float]) -> Iterator[None]:
    """Packed attention has sinks, or capped scores, too."""

    def changed(q: Tensor, k: Tensor, v: Tensor, packing: PackedSequences, *args: Any, **options: Any) -> Tensor:
        options["softcap"] = extra.get("softcap")
        options["sinks"] = torch.full_like(q[0, :, 0], extra["sink"]) if "sink" in extra else None
        return packed_attention(q, k, v, packing, *args, **options)

    with mock.patch.object(attention, "packed_attention", changed if extra else packed_attention):
        yield


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
                self.loop = importlib.import_module(f"benchmarks.bare_{work.backend}").Bare(work, self.device, plugin)
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
                self.found.sleeps = [self._sleep() for _ in range(2)]  # the first one pins host memory
                self.step()
        self._peaks.clear()

    def step(self) -> float:
        def train() -> None:
            self.found.norms.append(self.loop.train(self._batch, entropy=self._entropy))

        return timed(self.device, train, self._peaks, "step")

    def update(self) -> float:
        version = len(self.found.updates) + 1
        return timed(self.device, lambda: self.loop.worker.host.update_weights(sender=Nowhere(NOBODY), version=version))

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
        self.loop.close()
        return self.found


def measure(
    case: Case, rounds: int, sleep: bool, update: bool, profile: bool
) -> tuple[dict[str, Side], dict[str, str]]:
    """Called on every rank; the first one's result counts. What each side did, and versions."""
    first = next(iter(case.sides.values()))
    join(first)
    free, before = _host_free(), allocated(device_of(first))
    running: dict[str, Running] = {}
    with attention_with(next(iter(case.changed.values()), {}) if len(case.sides) == 1 else {}):
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
        if profile:
            for name, each in running.items():
                print(f"{name}\n{kernels(each)}", flush=True)
    host = (free - _host_free()) / GIB if len(running) == 1 else 0.0
    for each in running.values():
        each.found.host = host
        for _ in range(3 if update and isinstance(each.loop, Plugin) else 0):
            each.found.updates.append(each.update())
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


def _host_free() -> float:
    """Bytes that the host's kernel calls available; 0 where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0.0  # no Linux
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0.0)


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
            target = case.target if case.sides[base].loop != "padded" and case.sides[side].loop == "plugin" else None
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
        number("of the host", [start.host for start in found if start.host], "GiB")
        number("all weights gathered on one rank", [each for start in found for each in start.updates], "s")
        for at, when in enumerate(("the first time", "again")):
            for part, unit, words in ((0, "s", "sleep"), (3, "s", "wake up"), (1, "GiB", "freed"), (2, "GiB", "left")):
                number(f"{words}, {when}", [start.sleeps[at][part] for start in found if start.sleeps], unit)
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
    return (
        case.same
        and case.plugin.lora is None
        and not all(np.allclose(each[:2], first, rtol=1e-3 if exact else 5e-2) for each in norms.values())
    )


# ---- the program -----------------------------------------------------------------------------------------------------


def changed(case: Case, args: argparse.Namespace) -> Case:
    """As the command line says."""
    own = {name: value for name in ("tokens", "micro_batches") if (value := getattr(args, name)) is not None}
    own |= {"recompute": "full"} if args.recompute else {}
    own |= {"lora": LoraConfig(rank=args.lora).settled({})} if args.lora else {}
    options = tomllib.loads("\n".join(args.set))
    case = case.each(lambda work: evolve(work, **own, options={**work.options, **options}))
    case = evolve(case, apart=args.apart or case.apart, entropy=args.entropy or case.entropy)
    return case.each(lambda work: work.tiny) if args.tiny else case


def starts_of(case: Case, turns: int) -> list[Case]:
    """What is started one after the other; who comes first changes every turn."""
    if not case.apart or len(case.sides) == 1:
        return [case]
    one = [
        evolve(case, sides={name: work}, changed={name: case.changed.get(name, {})})
        for name, work in case.sides.items()
    ]
    return [each for turn in range(turns) for each in (one if turn % 2 == 0 else one[::-1])]


def main() -> None:
    parser = arguments(__doc__, rounds=6, settings="options of all sides")
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--turns", type=int, default=2, help="starts of each side where they are apart (default: 2)")
    parser.add_argument("--apart", action="store_true", help="the sides one after the other, for less memory")
    parser.add_argument("--entropy", action="store_true", help="the loss has an entropy bonus")
    parser.add_argument("--recompute", action="store_true", help="layers are recomputed for the backward pass")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters; a bare loop passes alone")
    parser.add_argument("--tokens", type=int, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, help="of a step, on each dp rank")
    parser.add_argument("--sleep", action="store_true", help="the plugin sleeps twice before the last warm-up step")
    parser.add_argument("--update", action="store_true", help="gather all weights on one rank, three times, at the end")
    parser.add_argument("--profile", action="store_true", help="print what the device does in a step of each side")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds that one start may take (default: 400)")
    args = parser.parse_args()
    reports: dict[str, Report] = {}
    failed: list[str] = []
    versions: dict[str, str] = {}
    for name in args.cases:
        case = changed(CASES[name], args)
        starts: dict[str, list[Side]] = {}
        for start in starts_of(case, args.turns):
            how = (start, args.rounds, args.sleep, args.update, args.profile)
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
            if args.output:
                finish(joined("train_step", list(reports.values())), args.output)
        if name in reports:
            print(f"{table([reports[name]])}\n\n{reports[name].note}\n", flush=True)
    different = [f"{name}: {DIFFERENT}" for name, each in reports.items() if DIFFERENT in each.note]
    if failed or different:
        sys.exit("; ".join([*failed, *different]))


if __name__ == "__main__":
    from benchmarks import train_step  # not as __main__: what ranks get is pickled with the name of its module

    train_step.main()
