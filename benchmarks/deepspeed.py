"""Measure the DeepSpeed backend on GPUs: training steps against a bare DeepSpeed loop, and the plugin's sleep.

python -m benchmarks.deepspeed stage2 stage3 offload 8b-zero3 --output found
python -m benchmarks.deepspeed --table found/*.json

Each case starts one process per GPU, and its file is written as soon as it is done. `--tiny` runs everything on CPUs
over gloo, to check that it works. Start it with `-m`: run as a file, it would shadow the package `deepspeed`. `steps`
defines FLOPs and MFU.

If two models fit into memory together, plugin and bare loop take turns in one process. Otherwise the case is `apart`:
plugin and bare loop each have the machine to themselves, one after the other, several times.

With `--awake 5` five more steps are measured before the plugin sleeps for the first time. They are reported separately
from those after it, with what the process's CPU and torch's allocator did in each. The bare loop takes as many, and
never sleeps.

Host memory of the 4B shape, 4.02 B parameters, with its optimizer on the host, in bytes per parameter. Stage 2: 4 for
masters, 4 for gradients and 2 for weights on their way back, all pinned, and 8 for moments: 18, that is 72 GB (67 GiB).
Before there are moments, 4 more are needed temporarily, since each pinned tensor is a copy of an unpinned one. On the
GPU 2, and 4 in a step, while gradients are summed. Stage 3: 4 for masters, 8 for moments, 4 for gradients, pinned in
groups of up to 1e9, and 4 for their sums, pinned in one tensor that torch rounds up to 16 GiB: 20.3, that is 81 GB (76
GiB); on the GPU 2. Either fits into 128 GiB once, but not twice, so these cases are apart.

Nothing is compiled: with a client's optimizer, here torch's AdamW, DeepSpeed 0.19.8 loads none of its ops, and it pins
memory through torch. Only `offload-cpu-adam` compiles DeepSpeed's own CPU Adam, with g++ and, on a machine with a GPU,
CUDA's headers; if that fails, the plugin's side is still measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from attrs import asdict, evolve, field, frozen
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.report import Comparison, Number, Report, in_turns, table
from benchmarks.steps import (
    COMMON,
    DIFFERENT,
    GIB,
    OPTIMIZER,
    PEAK,
    QWEN3_8B,
    SLICE,
    TARGET,
    Plugin,
    QuickWeights,
    Work,
    allocated,
    clipped_loss,
    device_of,
    environment,
    facts,
    flops,
    join,
    packed_batch,
    run_ranks,
    timed,
)
from corerl.models.attention import PACKED, register_packed_attention
from corerl.models.layouts import packed_call
from corerl.ops.attention import PackedSequences
from corerl.ops.logprobs import token_logprobs
from corerl.types import MemoryKind, PackedBatch

PLUGIN, BARE = "the plugin", "bare DeepSpeed"
WHO = {"plugin": (PLUGIN,), "bare": (BARE,), "both": (PLUGIN, BARE)}
WARM_UP = 3  # steps of each side before any is measured; the plugin sleeps and wakes before the last of them
BUCKET = 3 * 2**24  # elements, as the plugin's defaults

QWEN3_4B = {
    **COMMON,
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}


@frozen(kw_only=True)
class Case(Work):
    """And how it is measured."""

    apart: bool = False  # plugin and bare loop in processes of their own
    cpu_adam: bool = False  # the bare loop steps with DeepSpeed's CPU Adam

    @property
    def stage(self) -> int:
        return int(self.options["stage"])

    @property
    def offloads(self) -> bool:
        return bool(self.options.get("offload", "none") != "none")

    @property
    def tiny(self) -> Case:
        """The same case for the CPU."""
        return evolve(self, **self.on_cpu(), cpu_adam=False, ranks=min(self.ranks, 2))


OFFLOAD = {"offload": "optimizer"}
CASES = {
    "stage3": Case(what="8 layers of the 8B shape, stage 3", fields=SLICE, options={"stage": 3}),
    "stage2": Case(what="8 layers of the 8B shape, stage 2", fields=SLICE, options={"stage": 2}),
    "offload": Case(
        what="4B shape, stage 2, optimizer on the host", fields=QWEN3_4B, options={"stage": 2, **OFFLOAD}, apart=True
    ),
    "offload-stage3": Case(
        what="4B shape, stage 3, optimizer on the host", fields=QWEN3_4B, options={"stage": 3, **OFFLOAD}, apart=True
    ),
    "offload-cpu-adam": Case(
        what="4B shape, stage 2, optimizer on the host, the bare loop's DeepSpeed's own",
        fields=QWEN3_4B,
        options={"stage": 2, **OFFLOAD},
        apart=True,
        cpu_adam=True,
    ),
    "8b-zero3": Case(
        what="8B shape, stage 3", fields=QWEN3_8B, ranks=4, options={"stage": 3}, tokens=4096, micro_batches=4
    ),
    "8b-zero3-2": Case(
        what="8B shape, stage 3",
        fields=QWEN3_8B,
        ranks=2,
        options={"stage": 3},
        tokens=4096,
        micro_batches=4,
        apart=True,
    ),
}


# ---- the bare loop ---------------------------------------------------------------------------------------------------


class Policy(nn.Module):
    """A transformers model that ends in log-probs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor, packing: PackedSequences, temperature: float) -> Tensor:
        """[T - 1] log-probs of `tokens` [T] but the first; those of other sequences' first tokens mean nothing."""
        trunk = self.model.get_decoder()
        found = trunk(**packed_call(tokens, positions, packing))
        head = self.model.get_output_embeddings().weight
        # Behind a sequence's last token another one begins, at a token without a weight.
        logprobs, _ = token_logprobs(found.last_hidden_state[0, :-1], head, tokens[1:], temperature=temperature)
        return logprobs


class Bare:
    """A loop as one writes it by hand with DeepSpeed and transformers, around CoreRL's attention and log-probs.

    Called on every rank. Of the plugin it has nothing: DeepSpeed counts micro-batches, and its settings are written
    here.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self._device, self._linear = device, torch.nn.functional.linear
        self._averages = case.micro_batches * dist.get_world_size()
        # A CPU would compile an operation here that nothing calls; a GPU has none to compile.
        with mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None):
            deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        settings = self._settings(case)
        policy = Policy(self._model(case, settings))
        matrices = [param for param in policy.parameters() if len(_shape(param)) >= 2]
        others = [param for param in policy.parameters() if len(_shape(param)) < 2]
        groups = [
            {"params": matrices, "weight_decay": OPTIMIZER.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        adam: dict[str, Any] = {"lr": OPTIMIZER.lr, "betas": OPTIMIZER.betas, "eps": OPTIMIZER.eps}
        optimizer = DeepSpeedCPUAdam(groups, **adam) if case.cpu_adam else torch.optim.AdamW(groups, fused=True, **adam)
        self._engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=settings)
        if case.stage == 3:
            # Its weight is read by a module that it does not belong to.
            deepspeed.zero.register_external_parameter(policy, policy.model.get_output_embeddings().weight)

    @staticmethod
    def _settings(case: Case) -> dict[str, Any]:
        on_gpu = case.device == "cuda"
        bucket = BUCKET if on_gpu else 100_000
        zero: dict[str, Any] = {
            "stage": case.stage,
            "contiguous_gradients": True,
            "overlap_comm": on_gpu,
            "reduce_bucket_size": bucket,
        }
        zero |= {"stage3_prefetch_bucket_size": bucket} if case.stage == 3 else {"allgather_bucket_size": bucket}
        if case.offloads:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": case.micro_batches,
            "gradient_clipping": OPTIMIZER.clip_norm,
            "steps_per_print": None,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": case.precision == "bfloat16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_optimization": zero,
        }

    def _model(self, case: Case, settings: dict[str, Any]) -> Any:
        """With the weights that the plugin begins with."""
        register_packed_attention()
        config = AutoConfig.for_model(**case.fields)
        config.use_cache = False
        # zero.Init wraps the constructors of all modules that it finds: those of the model, if they are imported.
        _ = AutoModelForCausalLM._model_mapping[type(config)]
        partitioned = case.stage == 3
        with deepspeed.zero.Init(config_dict_or_path=settings) if partitioned else self._device:
            model = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, case.precision), attn_implementation=PACKED
            )
        model.tie_weights()  # zero.Init takes them apart
        if case.recompute == "full":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        weights = QuickWeights({name: _shape(param) for name, param in model.named_parameters()}, self._device)
        for name, param in model.named_parameters():
            with torch.no_grad(), deepspeed.zero.GatheredParameters(param, 0) if partitioned else nullcontext():
                if dist.get_rank() == 0 or not partitioned:  # what rank 0 writes is sent to the others
                    param.copy_(weights.whole(name))
        return model

    def train(self, batch: PackedBatch) -> float:
        """The gradient's norm before it is clipped."""
        self._engine.train()
        for micro in batch.micro_batches:
            tokens, positions = (torch.tensor(x, device=self._device) for x in (micro.tokens, micro.positions))
            packing = PackedSequences.of(micro.cu_seqlens, self._device)
            logprobs = self._engine(tokens, positions, packing, batch.temperature)
            # DeepSpeed divides by the number of micro-batches and of ranks.
            self._engine.backward(clipped_loss(logprobs, None, micro, self._device) * self._averages)
            self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def close(self) -> None:
        self._engine.destroy()
        del self._engine
        torch.nn.functional.linear = self._linear  # which zero.Init has replaced
        gc.collect()


def _shape(param: Any) -> tuple[int, ...]:
    """Of the whole parameter, also where it is partitioned."""
    return tuple(getattr(param, "ds_shape", param.shape))


# ---- measuring -------------------------------------------------------------------------------------------------------


# Of a step, on rank 0. A cache flush is torch's allocator giving back all that it keeps, for want of device memory.
WATCHED = (
    ("a step", "s"),
    ("CPU of the process in it", "s"),
    ("allocations of device memory in it", ""),
    ("cache flushes in it", ""),
    ("device memory that torch keeps", "GiB"),
    ("of that, free and in pieces", "GiB"),
)


@frozen(kw_only=True)
class Side:
    """What one side of a case did in one process of each rank. Seconds and GiB."""

    who: str
    steps: list[float]  # one a round
    norms: list[float]  # of every step's gradient, those that warm up too
    peak: float = 0.0  # that torch held at most on a rank in a measured step, without what the other side holds
    held: float = 0.0  # between steps, on rank 0
    host: float = 0.0  # of all ranks, that the host had less of after the steps
    sleeps: list[list[float]] = field(factory=list)  # of each: seconds, GiB freed, GiB left, seconds to wake
    early: list[list[float]] = field(factory=list)  # of each step before the plugin sleeps: see WATCHED
    late: list[list[float]] = field(factory=list)  # of each measured step


@frozen(kw_only=True)
class Found:
    """What one start of a case found."""

    name: str
    what: str
    size: str
    ranks: int
    tokens: int  # of a step, on all ranks
    flops: float  # of a step
    precision: str
    apart: bool
    sides: list[Side]
    facts: Mapping[str, str]


def measure(case: Case, name: str, who: Sequence[str], rounds: int, awake: int = 0) -> Found:
    """Called on every rank; the result is rank 0's. Both sides take `rounds` steps on the same micro-batches, and
    `awake` steps more before the plugin sleeps for the first time."""
    device, ranks = device_of(case), dist.get_world_size()
    batch = packed_batch(case, dp_rank=dist.get_rank(), dp_size=ranks)
    loss = case.loss(entropy=False)
    free, before = _host_free(), allocated(device)
    norms: dict[str, list[float]] = {side: [] for side in who}
    held: dict[str, float] = {}  # bytes
    peaks: dict[str, float] = {}
    slept: list[list[float]] = []
    early: dict[str, list[list[float]]] = {}
    late: dict[str, list[list[float]]] = {side: [] for side in who}
    plugin: Plugin | None = None
    bare: Bare | None = None

    def ours(number: int) -> float:
        assert plugin is not None
        step = plugin.train
        return timed(device, lambda: norms[PLUGIN].append(step(batch, loss)), peaks, PLUGIN)

    def others(number: int) -> float:
        assert bare is not None
        step = bare.train
        return timed(device, lambda: norms[BARE].append(step(batch)), peaks, BARE)

    if PLUGIN in who:
        plugin = Plugin("deepspeed", case, case.options)
        say(f"{PLUGIN} is built")
        for number in range(WARM_UP - 1):
            say(f"{PLUGIN}: a step to warm up, {ours(number):.2f} s")
        early[PLUGIN] = [_watched(device, ours, number) for number in range(awake)]
        slept = [_sleep(plugin, device) for _ in range(2)]  # the first one pins memory of the host
        say(f"{PLUGIN} slept and woke, {slept}; a step, {ours(0):.2f} s")
        held[PLUGIN] = allocated(device) - before
    if BARE in who:
        bare = Bare(case, device)
        say(f"{BARE} is built")
        for number in range(WARM_UP):
            say(f"{BARE}: a step to warm up, {others(number):.2f} s")
        early[BARE] = [_watched(device, others, number) for number in range(awake)]
        held[BARE] = allocated(device) - before - held.get(PLUGIN, 0.0)
    peaks.clear()

    def measured(side: str, step: Callable[[int], float]) -> Callable[[int], float]:
        def watched(number: int) -> float:
            late[side].append(_watched(device, step, number))
            return late[side][-1][0]

        return watched

    turns = [measured(side, {PLUGIN: ours, BARE: others}[side]) for side in who]
    if len(turns) == 2:
        in_turns(rounds, *turns)
    else:
        for number in range(rounds):
            turns[0](number)
    say("measured")

    total = before + sum(held.values())
    highest = [peaks] * ranks
    dist.all_gather_object(highest, {side: at - (total - held[side]) for side, at in peaks.items()})
    lengths = case.samples(ranks)
    sides = [
        Side(
            who=side,
            steps=[row[0] for row in late[side]],
            norms=norms[side],
            peak=max((at.get(side, 0.0) for at in highest), default=0.0) / GIB,
            held=held[side] / GIB,
            host=(free - _host_free()) / GIB if len(who) == 1 else 0.0,
            sleeps=slept if side == PLUGIN else [],
            early=early[side],
            late=late[side],
        )
        for side in who
    ]
    if bare is not None:
        bare.close()
    if plugin is not None:
        plugin.worker.shutdown("measured")
    return Found(
        name=name,
        what=case.what,
        size=(
            f"{case.fields['num_hidden_layers']} layers on {ranks} ranks, {case.micro_batches} micro-batches a step of "
            f"{case.tokens} tokens on each, in sequences of {case.sequence}"
        ),
        ranks=ranks,
        tokens=int(lengths.sum()),
        flops=flops(case.fields, lengths),
        precision=case.precision,
        apart=case.apart,
        sides=sides,
        facts={**facts(case, "deepspeed", "transformers"), "threads": str(torch.get_num_threads())},
    )


def _watched(device: torch.device, step: Callable[[int], float], number: int) -> list[float]:
    """WATCHED, of one step."""
    cpu, before = time.process_time(), _allocator(device)
    seconds = step(number)
    after = _allocator(device)
    made = [after[name] - before[name] for name in ("num_device_alloc", "num_alloc_retries")]
    kept = [after[f"{name}.all.current"] / GIB for name in ("reserved_bytes", "inactive_split_bytes")]
    return [seconds, time.process_time() - cpu, *made, *kept]


def _allocator(device: torch.device) -> Mapping[str, float]:
    """What torch counts of device memory; zeros on a CPU."""
    return torch.cuda.memory_stats(device) if device.type == "cuda" else defaultdict(float)


def _sleep(plugin: Plugin, device: torch.device) -> list[float]:
    """Everything: seconds, GiB freed, GiB left, seconds to wake."""
    host, kinds = plugin.worker.host, frozenset(MemoryKind)
    results = []
    down = timed(device, lambda: results.append(host.sleep(kinds=kinds)))
    up = timed(device, lambda: host.wake_up(kinds=kinds))
    return [down, results[0].freed_bytes / GIB, results[0].residual_bytes / GIB, up]


def _host_free() -> float:
    """Bytes that the host's kernel calls available; 0 where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0.0  # no Linux
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0.0)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# ---- what was found --------------------------------------------------------------------------------------------------

NOTE = (
    "One optimizer step from micro-batches on the host: forward, clipped loss over per-token log-probs, backward, "
    "clipping, AdamW. The plugin's side is both halves of a step through the worker, with metrics; the bare loop "
    "uses the same attention and the same kernel for log-probs, and computes no metric."
)


def report(starts: Sequence[Found]) -> Report:
    """Of one case, whose sides may have been apart: each side's starts in the order in which they are given."""
    first = starts[0]
    sides = {who: [side for found in starts for side in found.sides if side.who == who] for who in (PLUGIN, BARE)}
    steps = {who: [seconds for side in found for seconds in side.steps] for who, found in sides.items()}
    rounds = min(len(each) for each in steps.values())
    comparisons = []
    if rounds:
        comparisons.append(
            Comparison(
                what=f"a step of {first.tokens} tokens, {first.what}",
                against=BARE,
                ours=steps[PLUGIN][:rounds],
                other=steps[BARE][:rounds],
                target=round(1 / TARGET, 3),
            )
        )
    numbers, notes = [], [NOTE]
    for who, seconds in steps.items():
        if not seconds:
            continue
        rate = [first.tokens / each / 1e3 for each in seconds]
        mfu = [100 * first.flops / each / first.ranks / PEAK for each in seconds]
        numbers.append(Number(what=f"{who}: tokens a second", values=rate, unit="k"))
        numbers.append(Number(what=f"{who}: MFU", values=mfu, unit="%"))
        numbers.append(Number(what=f"{who}: peak of a GPU", values=[side.peak for side in sides[who]], unit="GiB"))
        numbers.append(Number(what=f"{who}: between steps", values=[side.held for side in sides[who]], unit="GiB"))
        if first.apart:
            numbers.append(Number(what=f"{who}: of the host", values=[side.host for side in sides[who]], unit="GiB"))
    slept = [side.sleeps for side in sides[PLUGIN] if side.sleeps]
    for at, what in enumerate(("the first time", "again")):
        for part, unit, words in ((0, "s", "sleep"), (3, "s", "wake up"), (1, "GiB", "freed"), (2, "GiB", "left")):
            if values := [each[at][part] for each in slept]:
                numbers.append(Number(what=f"sleep of all, {what}: {words}", values=values, unit=unit))
    for who, when, phase in (
        *((PLUGIN, "before its first sleep", "early"), (PLUGIN, "after it", "late")),
        *((BARE, "as many steps", "early"), (BARE, "the steps after", "late")),
    ):
        if any(side.early for side in sides[who]):
            rows = [row for side in sides[who] for row in getattr(side, phase)]
            for (what, unit), column in zip(WATCHED, zip(*rows, strict=True), strict=True):
                numbers.append(Number(what=f"{who}, {when}: {what}", values=column, unit=unit))
    if all(sides.values()):
        warm = [side[0].norms[:WARM_UP] for side in sides.values()]
        close = np.allclose(warm[0], warm[1], rtol=1e-3 if first.precision == "float32" else 5e-2)
        notes += [] if close else [DIFFERENT]
        pairs = "; ".join(f"{a:.5g} and {b:.5g}" for a, b in zip(*warm, strict=True))
        notes.append(f"Norms of the first gradients, plugin and bare loop: {pairs}.")
    if first.apart:
        notes.append("Plugin and bare loop ran one after the other, in separate processes.")
    return Report(
        name=first.name,
        size=first.size,
        comparisons=comparisons,
        numbers=numbers,
        note=" ".join(notes),
        versions=first.facts,
    )


def show(files: Sequence[Path]) -> str:
    """What the files of several cases hold, as markdown."""
    cases: dict[str, list[Found]] = {}
    for path in files:
        plain = json.loads(path.read_text())
        found = Found(**{**plain, "sides": [Side(**side) for side in plain["sides"]]})
        cases.setdefault(found.name, []).append(found)
    reports = [report(starts) for starts in cases.values()]
    versions = dict.fromkeys(f"{name} {value}" for each in reports for name, value in each.versions.items())
    notes = [f"- **{each.name}** ({each.size}). {each.note}" for each in reports]
    return "\n\n".join([", ".join(versions), table(reports), "\n".join(notes)]) + "\n"


# ---- the program -----------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Start:
    """Processes of one case that are started together, and the file that they end in."""

    name: str
    who: str  # a key of WHO
    file: Path


def starts_of(name: str, *, apart: bool, turns: int, output: Path) -> list[Start]:
    if not apart:
        return [Start(name=name, who="both", file=output / f"{name}.json")]
    # Who comes first changes every turn.
    order = [who for turn in range(turns) for who in (("plugin", "bare") if turn % 2 == 0 else ("bare", "plugin"))]
    return [
        Start(name=name, who=who, file=output / f"{name}-{number}-{who}.json")
        for number, who in enumerate(order, start=1)
    ]


def launch(start: Start, *, words: Sequence[str], case: Case, limit: float) -> str:
    """Why it failed; "" where it did not. Ends all of its processes when `limit` seconds are over."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    command = [sys.executable, *(torchrun if case.ranks > 1 else [])]
    command += ["-m", "benchmarks.deepspeed", start.name, "--who", start.who, "--output", str(start.file), *words]
    threads = max(1, (os.cpu_count() or 1) // case.ranks)  # AdamW's, where it is on the host
    more = {"OMP_NUM_THREADS": str(threads), **environment("deepspeed", case, case.options)}
    return run_ranks(command, more=more, limit=limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(CASES)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=names)
    parser.add_argument("--rounds", type=int, default=6, help="measured steps of each side in a start (default: 6)")
    parser.add_argument("--turns", type=int, default=2, help="starts of each side where they are apart (default: 2)")
    parser.add_argument("--awake", type=int, default=0, help="steps measured before the first sleep too (default: 0)")
    parser.add_argument("--apart", action="store_true", help="the sides one after the other, for less memory")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds that one start may take (default: 400)")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to see that everything runs")
    parser.add_argument("--output", type=Path, help="a directory for what is found; a JSON file with --who")
    parser.add_argument("--who", choices=[*WHO], help="measure, as a rank of a single case, and start nothing")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="only print what these files hold")
    args = parser.parse_args()
    if args.table:
        print(show(args.table))
        return
    if unknown := sorted(set(args.cases) - CASES.keys()):
        parser.error(f"no case {', '.join(unknown)}; there are {names}")
    if not args.cases or args.output is None:
        parser.error(f"which case, and where to? CASE ... --output DIRECTORY, of {names}")
    cases = {name: CASES[name].tiny if args.tiny else CASES[name] for name in args.cases}
    if args.who:
        _rank(cases[args.cases[0]], args.cases[0], WHO[args.who], args.rounds, args.awake, args.output)
        return
    args.output.mkdir(parents=True, exist_ok=True)
    words = ["--rounds", str(args.rounds), "--awake", str(args.awake), *(["--tiny"] if args.tiny else [])]
    failed = []
    for name, case in cases.items():
        done = []
        for start in starts_of(name, apart=args.apart or case.apart, turns=args.turns, output=args.output):
            if why := launch(start, words=words, case=case, limit=args.limit):
                failed.append(f"{name} ({start.who}): {why}")
                print(failed[-1], flush=True)
            else:
                done.append(start.file)
        if done:
            print(show(done), flush=True)
    if failed:
        sys.exit("; ".join(failed))


def _rank(case: Case, name: str, who: Sequence[str], rounds: int, awake: int, file: Path) -> None:
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it
    warnings.filterwarnings("ignore", category=FutureWarning)  # of names that DeepSpeed calls and torch will change
    join(case)
    found = measure(case, name, who, rounds, awake)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(asdict(found)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
