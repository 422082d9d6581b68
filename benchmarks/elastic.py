"""Measure what it takes to change the size of a train group, to go on after a rank was killed, and to keep copies.

python3 -m benchmarks.elastic --output found/elastic.json     # two GPUs of 80 GB, 32 cores, 60 GiB in /dev/shm
python3 -m benchmarks.elastic resize --shape 4b               # the largest that fits there
python3 -m benchmarks.elastic --tiny                          # two ranks on a CPU

No engine takes part: ranks of the FSDP backend train on made-up samples, with random weights. Parts, each a process:

- `resize`: a group of two ranks takes steps undisturbed; restarted, it takes the same steps and is resized to one
  rank and back between them. Log-probs and gradient norms must be the same. Its seconds are told apart by what the
  first new rank does. Those of moving the state are compared with copies of as many bytes by one process: out of its
  device into pinned host memory and in again, first one, then the other.
- `memory`: steps with a copy in memory after each, as a run with checkpoint.memory = true makes it, and steps without,
  in blocks in turns. What waits for a copy is part of the step. Beside them copies while nothing is trained: the first
  two, which make their files, and others, which are written over those.
- `heal`: two runs of `corerl train` on saved samples whose last rank is killed by SIGKILL as it computes gradients, one
  with copies in memory, one with checkpoints on disk. Seconds are from then to the end of the next step. A step that
  both runs have done, or one of them twice, must have the same gradient norm.

What a resize needs: a rank holds float32 masters and two moments, 12 bytes for each of its parameters. The device that
both sides are on has the whole, of the single rank, and half, of one of two: 18 P bytes, and two CUDA contexts, NCCL's
buffers and this allocator's rounding, for which ROOM is left. A step of the single rank needs 16 P, with gradients, and
activations, of which little is kept where layers are recomputed. So P may be (80 GB - ROOM) / 18: 4.1 billion.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import itertools
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from attrs import define, evolve, field
from ray.exceptions import RayError
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.report import ENVIRONMENT, ROOT, Comparison, Number, Report, finish, load
from benchmarks.runs import Watched, value
from benchmarks.samples import GROUP, make_batch
from benchmarks.steps import GIB, QWEN3_600M, TINY
from benchmarks.streamed import DIE, Killing
from benchmarks.streamed import mortal as dies
from corerl.algorithms import LossInputs, LossResult
from corerl.algorithms.losses import clipped
from corerl.checkpoint.writer import MEMORY
from corerl.cluster.heartbeat import ASIDE
from corerl.cluster.process import cores
from corerl.config.schema import CheckpointConfig
from corerl.data.prompts import Prompt
from corerl.driver.checkpoints import Checkpoints, MemoryCheckpoints
from corerl.rollout.recorded import write_rollout
from corerl.rollout.rewards.pool import descendants
from corerl.rollout.sampler import Rollout
from corerl.rollout.scored import ScoredRollout
from corerl.trainer.group import TrainGroup
from corerl.types import FloatArray, Output, SampleBatch, Step, TrainResult

STATE = 12  # bytes of a parameter's master and moments
OVERLAP = 18  # bytes of a parameter on the device where one rank and one of two are
ROOM = 6e9  # bytes for contexts, NCCL and what the allocator rounds up
RESIZE, COPIES = 2.0, 1.02  # targets: of the copies' time; of the step without copies
LOGPROBS = Output.LOGPROBS
BLOCK = 2**28  # bytes of a copy alone
PART = 2**25  # bytes of each of many copies
POLL_SECONDS = 0.02
DIFFERENT = "RESULTS DIFFER"
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {**QWEN3_600M, **TINY},
    # 1.1 billion parameters; 3.1, as Qwen2.5-3B; 4.0, as Qwen3-4B.
    "1b": {**QWEN3_600M, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16},
    "3b": {
        **QWEN3_600M,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
    },
    "4b": {
        **QWEN3_600M,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}
PARTS = ("resize", "memory", "heal")


def parameters(shape: str) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[shape]))
    return sum(param.numel() for param in model.parameters())


def most_parameters(device_bytes: float) -> float:
    """That a group of two may have, which is resized to one and back on such devices."""
    return (device_bytes - ROOM) / OVERLAP


# ---- what was found --------------------------------------------------------------------------------------------------


@define
class Found:
    """The report so far; written to the file again whenever something is added."""

    output: Path

    def add(self, *rows: Comparison | Number, note: str = "") -> None:
        """Rows replace earlier ones of the same name."""
        report, names = load(self.output), {row.what for row in rows}
        comparisons = [row for row in rows if isinstance(row, Comparison)]
        numbers = [row for row in rows if isinstance(row, Number)]
        report = evolve(
            report,
            comparisons=[*(row for row in report.comparisons if row.what not in names), *comparisons],
            numbers=[*(row for row in report.numbers if row.what not in names), *numbers],
            note=" ".join(filter(None, [report.note, note])),
        )
        partial = self.output.with_suffix(".partial")
        finish(report, str(partial))
        partial.replace(self.output)
        for each in rows:
            print("   ", " | ".join(filter(None, each.row())), flush=True)
        if note:
            print(f"    {note}", flush=True)

    def require(self, same: bool, what: str) -> None:
        """Note a comparison of results."""
        self.add(note=f"{what}." if same else f"{DIFFERENT}: {what}.")


@contextlib.contextmanager
def phase(name: str, limit: float) -> Iterator[Callable[[], float]]:
    """Tell what a phase took, and end this process and all that it has started if it takes longer than `limit`
    seconds. Yields a function that gives its seconds."""
    began = time.monotonic()
    over: list[float] = []

    def late() -> None:
        print(f"{name}: not done after {limit:.0f} s; giving up", flush=True)
        faulthandler.dump_traceback()
        end_descendants()
        os._exit(3)

    timer = threading.Timer(limit, late)
    timer.daemon = True
    timer.start()
    try:
        yield lambda: over[0] if over else time.monotonic() - began
    finally:
        timer.cancel()
        over.append(time.monotonic() - began)
        print(f"{name}: {over[0]:.2f} s", flush=True)


def end_descendants() -> None:
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# ---- a group, and its steps ------------------------------------------------------------------------------------------


def config(args: argparse.Namespace, shape: str) -> dict[str, Any]:
    return {
        "backend": {"name": "fsdp"},
        "backends": {"fsdp": {"compile": args.compile}},
        "cluster": {"device": "cpu" if args.tiny else "cuda"},
        "model": {"config": SHAPES[shape]},
        "roles": {"actor": {"ranks": 2}},
        "train": {
            "precision": "float32" if args.tiny else "bfloat16",
            "recompute": "full",
            "tokens_per_micro_batch": args.micro_batch,
            "optimizer": {"lr": args.lr, "clip_norm": 1.0},
        },
    }


def samples_of(args: argparse.Namespace, shape: str, tokens: int, seed: int) -> SampleBatch:
    lengths = np.full(tokens // args.sequence, args.sequence)
    return make_batch(lengths, prompt=args.sequence // 8, vocab=SHAPES[shape]["vocab_size"], seed=seed)


def step_at(args: argparse.Namespace, number: int) -> Step:
    return Step(optimizer_step=number, rollout_step=number, lr=args.lr)


@define
class Trained:
    """A group whose steps are counted."""

    args: argparse.Namespace
    group: TrainGroup
    samples: SampleBatch
    done: int = 0
    norms: list[float] = field(factory=list)

    @property
    def next(self) -> Step:
        return step_at(self.args, self.done)

    def step(self) -> TrainResult:
        (plan,) = self.group.plan_steps(self.samples, seed=self.done)
        objective = self.group.plan.objective
        assert objective is not None  # it is trained
        result = self.group.train(self.samples, plan, objective.loss, self.next).result()
        self.done += 1
        self.norms.append(result.grad_norm)
        return result

    def steps(self, count: int, what: str) -> None:
        for _ in range(count):
            with phase(f"{what}, step {self.done}", self.args.limit):
                self.step()

    def logprobs(self) -> FloatArray:
        found = self.group.forward(self.samples, LOGPROBS).result()[LOGPROBS]
        return np.asarray(found[self.samples.columns["loss_mask"]], dtype=np.float32)


# ---- resize ----------------------------------------------------------------------------------------------------------


@define
class Watching:
    """When the phases of the start of each new rank ended, as a watchdog sees them."""

    began: float = field(factory=time.monotonic)
    ends: list[dict[str, float]] = field(factory=list)  # by rank: phase -> time.monotonic()
    used: list[list[float]] = field(factory=list)  # GiB by GPU, again and again
    _over: threading.Event = field(factory=threading.Event)
    _threads: list[threading.Thread] = field(factory=list)

    def follow(self, group: TrainGroup) -> None:
        """From now on, until `close`."""
        for actor in (member.actor for member in group.processes._members):
            self.ends.append({})
            self._begin(functools.partial(self._follow, actor, self.ends[-1]))
        self._begin(self._weigh)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _begin(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def _follow(self, actor: Any, ends: dict[str, float]) -> None:
        last = "process"
        while last and not self._over.is_set():
            asked = actor.heartbeat.options(concurrency_group=ASIDE).remote()
            while not ray.wait([asked], timeout=POLL_SECONDS)[0] and not self._over.is_set():
                pass
            try:
                now = ray.get(asked, timeout=0.0).phase
            except RayError:  # the awaited call says why
                return
            if now != last:
                ends[last], last = time.monotonic(), now
            self._over.wait(POLL_SECONDS)

    def _weigh(self) -> None:
        while not self._over.wait(0.3):
            self.used.append(device_memory())

    @property
    def seconds(self) -> dict[str, float]:
        """Of each phase until the last rank was through with it."""
        found, before = {}, self.began
        for name in self.ends[0] if self.ends else ():
            end = max(each.get(name, before) for each in self.ends)
            found[name], before = end - before, end
        return found


def device_memory() -> list[float]:
    """GiB in use of each GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [float(line) / 1024 for line in told.split() if line.isdigit()]


def resized(trained: Trained, ranks: int, found: Found) -> float:
    """Resize the group; returns the seconds in which the state moved."""
    group, watching = trained.group, Watching()
    inner = TrainGroup.init

    def init(self: TrainGroup) -> Any:
        watching.follow(self)
        return inner(self)

    TrainGroup.init = init  # type: ignore[method-assign]
    before = len(group.layouts)
    name = f"resize {before} -> {ranks}"
    try:
        with phase(name, trained.args.limit) as seconds:
            with tempfile.TemporaryDirectory(dir=MEMORY) as state:
                group.save(state, trained.next).result()
                group.resize(state, ranks=ranks)
    finally:
        watching.close()
        TrainGroup.init = inner  # type: ignore[method-assign]
    assert len(group.layouts) == ranks
    found.add(Number(what=f"{name}: all", values=[seconds()], unit="s"))
    found.add(*(Number(what=f"{name}: {each}", values=[took], unit="s") for each, took in watching.seconds.items()))
    for gpu, after in enumerate(device_memory()):
        most = max((each[gpu] for each in watching.used if len(each) > gpu), default=math.nan)
        found.add(
            Number(what=f"{name}: GPU {gpu}, most in use", values=[most], unit="GiB"),
            Number(what=f"{name}: GPU {gpu}, in use afterwards", values=[after], unit="GiB"),
        )
    return watching.seconds.get("load", math.nan)


def copies(nbytes: int, tiny: bool, results: Any) -> None:
    """Put the seconds in which a process moves so many bytes, in several ways. Nobody else uses the devices."""
    torch.set_num_threads(1)
    block = min(nbytes, BLOCK)
    times = nbytes / block

    def timed(once: Callable[[], object]) -> float:
        once()
        rounds = max(1, min(20, int(times)))
        if not tiny:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(rounds):
            once()
        if not tiny:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / rounds * times

    if tiny:
        source, target = torch.ones(block, dtype=torch.uint8), torch.ones(block, dtype=torch.uint8)
        results.put({"alone": timed(lambda: target.copy_(source))})
        return
    source = torch.ones(block, dtype=torch.uint8, device="cuda:0")
    target = torch.ones(block, dtype=torch.uint8, device="cuda:0")
    pinned = torch.ones(block, dtype=torch.uint8, pin_memory=True)
    pageable = torch.ones(2 * PART, dtype=torch.uint8)

    def parts(host: torch.Tensor) -> None:
        for number, (into, out) in enumerate(zip(target.split(PART), source.split(PART), strict=True)):
            room = host[number % 2 * PART :][: len(out)]
            room.copy_(out)
            into.copy_(room)

    def through(host: torch.Tensor) -> None:
        host.copy_(source)
        target.copy_(host)

    found = {
        "alone": timed(lambda: through(pinned)),
        "out, pinned": timed(lambda: pinned.copy_(source)),
        "in, pinned": timed(lambda: target.copy_(pinned)),
        "in parts of 32 MiB, pinned": timed(lambda: parts(pinned)),
        "in parts of 32 MiB, not pinned": timed(lambda: parts(pageable)),
    }
    if torch.cuda.device_count() > 1:
        other = torch.ones(block, dtype=torch.uint8, device="cuda:1")
        found["device to device"] = timed(lambda: target.copy_(other))
    results.put(found)


def copied(nbytes: int, args: argparse.Namespace) -> dict[str, float]:
    """In a process of its own, whose device memory is free again afterwards."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    process = spawn.Process(target=copies, args=(nbytes, args.tiny, results))
    with phase("copies alone", args.limit):
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"the copies alone ended with {process.exitcode}")
        found: dict[str, float] = results.get()
    return found


def resize(args: argparse.Namespace, found: Found) -> None:
    count = parameters(args.shape)
    nbytes = STATE * count
    ways = copied(nbytes, args)
    alone = [ways["alone"]]
    found.add(
        Number(what="state", values=[nbytes / GIB], unit="GiB"),
        Number(what="parameters", values=[count / 1e9], unit="billion"),
        *(Number(what=f"copy {how}", values=[took], unit="s") for how, took in ways.items()),
    )
    with contextlib.ExitStack() as stack:
        with phase(f"two ranks of {args.shape} start", args.limit):
            group = stack.enter_context(TrainGroup.start(config(args, args.shape)))
        samples = samples_of(args, args.shape, args.resize_tokens, seed=0)
        plain = Trained(args, group, samples)
        total = 2 + 2 * args.rounds
        with phase("log-probs of the initial weights", args.limit):
            initial = plain.logprobs()
        plain.steps(total, "undisturbed")
        with phase("log-probs", args.limit):
            wanted = plain.logprobs()
        with phase("the same group from its initial weights", args.limit):
            group.restart("").result()
        trained = Trained(args, group, samples)
        trained.steps(2, "two ranks")
        ours: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(args.rounds):
            for ranks in (1, 2):
                with phase("log-probs", args.limit):
                    before = trained.logprobs()
                ours[ranks].append(resized(trained, ranks, found))
                found.add(
                    Comparison(
                        what=f"resize {3 - ranks} -> {ranks}: the state is taken over",
                        against="as many bytes out and in",
                        ours=ours[ranks],
                        other=alone * len(ours[ranks]),
                        target=None if args.tiny else RESIZE,
                    )
                )
                after = trained.logprobs()
                compare_logprobs(args, found, f"{3 - ranks} -> {ranks}", before, after, np.abs(before - initial).mean())
                trained.steps(1, f"{ranks} rank{'s' * (ranks > 1)}")
        compare_logprobs(
            args, found, "undisturbed and resized", wanted, trained.logprobs(), np.abs(wanted - initial).mean()
        )
        tolerance = 1e-4 if args.tiny else 5e-2
        found.require(
            np.allclose(plain.norms, trained.norms, rtol=tolerance),
            "gradient norms, undisturbed and resized: "
            + ", ".join(f"{a:.5g} and {b:.5g}" for a, b in zip(plain.norms, trained.norms, strict=True)),
        )


def compare_logprobs(
    args: argparse.Namespace, found: Found, what: str, wanted: FloatArray, got: FloatArray, trained: float
) -> None:
    """`trained`: how far training has moved them, beside which a difference must be small."""
    off = float(np.abs(wanted - got).mean())
    good = off < (1e-5 if args.tiny else 2e-2) and off < 0.2 * trained
    found.require(good, f"log-probs, {what}: mean difference {off:.3g}, where training has moved them by {trained:.3g}")


# ---- memory ----------------------------------------------------------------------------------------------------------


def share(seconds: dict[bool, list[float]], waits: list[float]) -> float:
    """What the loop waits for copies, as a part of the step without."""
    return float(np.median(waits) / np.median(seconds[False]))


def memory(args: argparse.Namespace, found: Found) -> None:
    nbytes = STATE * parameters(args.step_shape)
    free = shutil.disk_usage(MEMORY).free
    found.add(
        Number(what="/dev/shm: free", values=[free / GIB], unit="GiB"),
        Number(what="/dev/shm: two copies need", values=[2 * nbytes / GIB], unit="GiB"),
        Number(what="cores", values=[cores()], unit=""),
    )
    if free < 2 * nbytes:
        raise SystemExit(f"{MEMORY} has too little room; take a smaller --step-shape")
    with contextlib.ExitStack() as stack:
        with phase(f"two ranks of {args.step_shape} start", args.limit):
            group = stack.enter_context(TrainGroup.start(config(args, args.step_shape)))
        trained = Trained(args, group, samples_of(args, args.step_shape, args.tokens, seed=0))
        role: Any = SimpleNamespace(group=group, step=lambda rollout_step: step_at(args, rollout_step))
        progress: Any = SimpleNamespace(notice=print)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="elastic-")))
        saves = Checkpoints(directory, CheckpointConfig(), {"actor": role}, progress)
        kept = stack.enter_context(MemoryCheckpoints.of_run(saves))
        trained.steps(2, "warming up")
        before: list[float] = []
        for _ in range(args.block):
            with phase(f"step {trained.done}, before there is any copy", args.limit) as took:
                trained.step()
            before.append(took())
        found.add(Number(what="step, before there is any copy", values=before, unit="s"))

        def copy() -> None:
            """As the run's own `_start_copy`."""
            kept.start(trained.done, {"rollout_step": trained.done}, background=True)

        for what, count in (("the first ones", 2), ("later ones", 3)):
            begun, written = [], []
            for _ in range(count):
                with phase(f"a copy alone: {what}", args.limit) as took:
                    copy()
                    begun.append(took())
                    kept.complete(wait=True)
                written.append(took())
                trained.step()
            found.add(
                Number(what=f"copy alone, {what}: the loop waits", values=begun, unit="s"),
                Number(what=f"copy alone, {what}: until it is complete", values=written, unit="s"),
                Number(what=f"copy alone, {what}", values=[nbytes / 1e9 / each for each in written], unit="GB/s"),
            )
        seconds: dict[bool, list[float]] = {False: [], True: []}
        waits: list[float] = []
        for turn in range(2 * args.turns):
            copying = turn % 2 == 1
            for number in range(args.block + 1):
                what = f"step {trained.done}, {'with' if copying else 'without'} a copy"
                with phase(what, args.limit) as took:
                    trained.step()
                    began = time.monotonic()
                    if copying:
                        copy()
                    waited = time.monotonic() - began
                if number:  # in the first, no copy of a step before is under way
                    seconds[copying].append(took())
                    waits += [waited] * copying
            if copying:
                with phase("the last copy is complete", args.limit):
                    kept.complete(wait=True)
                found.add(
                    Comparison(
                        what="step, with copies in memory",
                        against="without",
                        ours=seconds[True],
                        other=seconds[False],
                        target=None if args.tiny else COPIES,
                    ),
                    Number(what="copies in memory: the loop waits, a step", values=waits, unit="s"),
                    Number(what="copies in memory: of the step", values=[100 * share(seconds, waits)], unit="%"),
                )
        assert kept.newest is not None
        size = sum(file.stat().st_size for file in kept.newest.rglob("*") if file.is_file())
        found.add(Number(what="a copy", values=[size / GIB], unit="GiB"))
        # It must be one to go on from: the step after it is the same.
        with phase("log-probs", args.limit):
            wanted = trained.logprobs()
        with phase("ranks that begin with the copy", args.limit) as took:
            init = group.restart(str(kept.newest / "actor")).result()
        same = np.abs(trained.logprobs() - wanted).mean()
        found.require(
            init.optimizer_step == trained.done and same < (1e-5 if args.tiny else 1e-3),
            f"the copy of step {init.optimizer_step} gives log-probs with a mean difference of {same:.3g}",
        )
        found.add(Number(what="ranks restarted from the copy, alone", values=[took()], unit="s"))


# ---- heal ------------------------------------------------------------------------------------------------------------


def mortal(inputs: LossInputs, **params: Any) -> LossResult:
    """`clipped`, in ranks of which the last can be told to die."""
    last = dist.get_rank() == dist.get_world_size() - 1
    return dies(inputs, **params) if last else clipped(inputs, **params)


def write_samples(args: argparse.Namespace, directory: Path, steps: int) -> None:
    """Saved batches, as of a run that samples."""
    for number in range(steps):
        batch = samples_of(args, args.step_shape, args.tokens, seed=number)
        count, prompt = len(batch), args.sequence // 8
        columns = {name: batch.columns[name] for name in ("loss_mask", "rollout_logprobs", "versions")}
        columns["versions"] = np.zeros_like(columns["versions"])
        rows = {
            "group": batch.rows["group"],
            "sample": np.arange(count) % GROUP,
            "prompt_length": np.full(count, prompt),
            "response_length": np.full(count, args.sequence - prompt),
            "truncated": np.zeros(count, dtype=np.bool_),
        }
        prompts = tuple(Prompt(index=index, text="", answer="") for index in range(int(rows["group"][-1]) + 1))
        rollout = Rollout(batch=evolve(batch, columns=columns, rows=rows), prompts=prompts, texts=[""] * count)
        rewards = np.random.default_rng(number).random(count, dtype=np.float32)
        write_rollout(
            directory, ScoredRollout(step=number, rollout=rollout, rewards=rewards, exact_match=None, seconds={})
        )


def settings(args: argparse.Namespace, saved: Path, steps: int) -> list[str]:
    chosen = config(args, args.step_shape)
    train = chosen["train"]
    return [
        "run.mode=train-only",
        f"run.steps={steps}",
        f"rollout.saved={saved}",
        "cluster.device=" + chosen["cluster"]["device"],
        "roles.actor.ranks=2",
        "backends.fsdp.shard_size=0",
        "backends.fsdp.sync=every",
        f"backends.fsdp.compile={value(args.compile)}",
        *(f"model.config.{name}={value(each)}" for name, each in SHAPES[args.step_shape].items()),
        "model.config.initializer_range=0.02",
        *(f"train.{name}={value(train[name])}" for name in ("precision", "recompute", "tokens_per_micro_batch")),
        f"train.optimizer.lr={args.lr}",
        "train.mini_batches=1",
        "algorithm.loss=benchmarks.elastic:mortal",
        "algorithm.entropy_coef=0",
        "algorithm.overlong=keep",
        "algorithm.overlong_buffer=0",
        "checkpoint.export=false",
    ]


def healed(args: argparse.Namespace, kind: str, directory: Path, saved: Path, found: Found) -> dict[int, list[float]]:
    """The gradient norms of each step of a run whose last rank was killed."""
    total = args.saved_steps
    directory.mkdir(parents=True)
    killing = Killing(directory / "die", args.warm)
    before_kill: list[dict[str, Any]] = []  # a run takes back the lines of steps that it does again
    own = {
        "memory": ["checkpoint.every=0", "checkpoint.memory=true"],
        "disk": [f"checkpoint.every={args.warm - 1}"],
    }[kind]

    def look(run: Watched) -> bool:
        if kind == "disk" and not killing.died and not killing.told.exists() and not committed(run.directory):
            # Only once it is all on disk: later it would not be lost.
            killing.after = max(killing.after, sum("time/step" in line for line in run.lines()) + 1)
        over = killing(run)
        if killing.died and not before_kill:
            before_kill.extend(line for line in run.lines() if "time/step" in line)
        return over

    # Half of the cores a rank has, as in a run that is not a benchmark.
    threads = {} if args.tiny else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 4) // 4))}
    left = f"corerl-{os.getuid()}-*"
    before = set(MEMORY.glob(left))
    with (
        phase(f"the run that goes on from {kind}", 2 * args.limit),
        Watched(
            *settings(args, saved, total), *own, directory=directory, environment={DIE: str(killing.told), **threads}
        ) as watched,
    ):
        ended = watched.wait(2 * args.limit - 20.0, look)
        lines = [line for line in watched.lines() if "time/step" in line]
    for each in set(MEMORY.glob(left)) - before:
        shutil.rmtree(each, ignore_errors=True)  # a run that ends by itself does so
    next_step, new_step = killing.seconds()
    told = re.search(r"restarting all ranks from (\D*\d+)", " ".join(ended.output.split()))
    if not (killing.died and killing.over):
        print(ended.output[-4000:], flush=True)
        found.add(note=f"{DIFFERENT}: {kind}: the run did not heal; it ended with {ended.status}.")
        return {}
    again = list(itertools.dropwhile(lambda line: "time/restart" not in line, lines))
    found.add(
        Number(what=f"heal from {kind}: SIGKILL to the end of the next step", values=[next_step], unit="s"),
        Number(what=f"heal from {kind}: SIGKILL to the end of a new step", values=[new_step], unit="s"),
        *(
            Number(
                what=f"heal from {kind}, the step after the kill: {name.removeprefix('time/')}", values=[took], unit="s"
            )
            for name, took in again[0].items()
            if name.startswith("time/")
        ),
        Number(
            what=f"heal from {kind}: steps before it",
            values=[line["time/step"] for line in before_kill[1:]],
            unit="s",
        ),
        note=f"{kind}: killed after {killing.after} steps, restarted from {told[1] if told else 'nothing'}.",
    )
    norms: dict[int, list[float]] = {}
    for line in [*before_kill, *again]:
        norms.setdefault(int(line["step"]), []).append(line["train/grad_norm"])
    return norms


def committed(run: Path) -> bool:
    return any(re.fullmatch(r"step-\d+", each.name) for each in (run / "checkpoints").glob("step-*"))


def heal(args: argparse.Namespace, found: Found) -> None:
    with tempfile.TemporaryDirectory(prefix="elastic-", dir=args.runs) as name:
        directory = Path(name)
        with phase("samples are written", args.limit):
            write_samples(args, directory / "saved", args.saved_steps)
        norms: dict[int, list[float]] = {}
        for kind in ("disk",) if args.from_disk else ("memory", "disk"):
            for step, values in healed(args, kind, directory / kind, directory / "saved", found).items():
                norms.setdefault(step, []).extend(values)
            shutil.rmtree(directory / kind, ignore_errors=True)
    several = {step: values for step, values in norms.items() if len(values) > 1}
    # The same samples and weights on as many ranks; on GPUs atomic additions may come in another order.
    same = all(np.allclose(values, values[0], rtol=1e-6 if args.tiny else 2e-2) for values in several.values())
    shown = "; ".join(f"step {step}: {', '.join(f'{each:.6g}' for each in values)}" for step, values in several.items())
    found.require(bool(several) and same, f"gradient norms of steps done more than once: {shown}")


# ---- program ---------------------------------------------------------------------------------------------------------


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; without any, all")
    command.add_argument("--shape", choices=SHAPES, help="of resize (default: 3b)")
    command.add_argument("--step-shape", choices=SHAPES, help="of memory and heal (default: 1b)")
    command.add_argument("--sequence", type=int, help="tokens of a sample (default: 2048)")
    command.add_argument("--tokens", type=int, help="of a step of memory and heal (default: 131072)")
    command.add_argument("--resize-tokens", type=int, help="of a step of resize (default: 32768)")
    command.add_argument("--micro-batch", type=int, help="tokens (default: 8192)")
    command.add_argument("--lr", type=float, default=1e-5)
    command.add_argument("--rounds", type=int, default=1, help="resizes to one rank and back (default: 1)")
    command.add_argument("--turns", type=int, default=3, help="blocks of steps with copies, and without (default: 3)")
    command.add_argument("--block", type=int, default=3, help="steps of a block that count (default: 3)")
    command.add_argument("--warm", type=int, default=4, help="steps before the kill (default: 4)")
    command.add_argument("--saved-steps", type=int, default=30, help="batches of the killed runs (default: 30)")
    command.add_argument("--from-disk", action="store_true", help="heal from disk alone, not from memory before")
    command.add_argument("--compile", action="store_true", help="compile layers: ranks start more slowly")
    command.add_argument("--limit", type=float, default=120.0, help="seconds of any phase (default: 120)")
    command.add_argument("--runs", help="a directory on the disk to measure, for heal's runs (default: TMPDIR)")
    command.add_argument("--tiny", action="store_true", help="two ranks on a CPU, to see that everything runs")
    command.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # one part, in this process
    command.add_argument("--output", help="a JSON file, written again after each number; without it a table is printed")
    args = command.parse_args(words)
    if unknown := set(args.parts) - set(PARTS):
        command.error(f"unknown parts {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    usual = {
        "shape": "3b",
        "step_shape": "1b",
        "sequence": 2048,
        "tokens": 2**17,
        "resize_tokens": 2**15,
        "micro_batch": 2**13,
    }
    if args.tiny:
        usual = {
            "shape": "tiny",
            "step_shape": "tiny",
            "sequence": 32,
            "tokens": 1024,
            "resize_tokens": 512,
            "micro_batch": 256,
        }
    for name, each in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, each)
    return args


def begin_report(args: argparse.Namespace, output: Path) -> None:
    versions = {"torch": torch.__version__, "ray": ray.__version__}
    if not args.tiny:
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        if len(devices) < 2:
            raise SystemExit(f"torch sees {len(devices)} GPUs, 2 are needed; or --tiny")
        least = min(each.total_memory for each in devices)
        count, most = parameters(args.shape), most_parameters(least)
        print(f"{args.shape}: {count / 1e9:.2f} billion parameters; {most / 1e9:.2f} are safe on {least / GIB:.1f} GiB")
        if "resize" in (args.parts or PARTS) and count > most:
            raise SystemExit(f"--shape {args.shape}: a resize would not fit; see --help")
        versions["GPU"] = f"{devices[0].name} x {len(devices)}"
    output.parent.mkdir(parents=True, exist_ok=True)
    finish(
        Report(
            name="elastic",
            size=f"resize: {args.shape}, {args.resize_tokens} tokens a step; memory and heal: {args.step_shape}, "
            f"{args.tokens} tokens a step; fsdp, {'compiled' if args.compile else 'eager'}",
            versions=versions,
        ),
        str(output),
    )


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    os.environ.update({name: each for name, each in ENVIRONMENT.items() if args.tiny or name != "OMP_NUM_THREADS"})
    if args.inside:
        found = Found(Path(args.output))
        {"resize": resize, "memory": memory, "heal": heal}[args.parts[0]](args, found)
        return 0
    began = time.monotonic()
    own = sys.argv[1:] if words is None else list(words)
    options = [word for word in own if word not in PARTS]
    with tempfile.TemporaryDirectory(prefix="elastic-") as directory:
        output = Path(args.output or Path(directory, "found.json")).absolute()
        begin_report(args, output)
        failed = []
        for part in args.parts or PARTS:
            print(f"---- {part}, after {time.monotonic() - began:.0f} s", flush=True)
            command = [sys.executable, "-m", "benchmarks.elastic", part, *options, "--inside", "--output", str(output)]
            if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
                failed.append(part)
                Found(output).add(note=f"{part} FAILED with {code}.")
        report = load(output)
        finish(report, None)
    print(report.note)
    print(f"all: {time.monotonic() - began:.0f} s")
    return int(bool(failed) or DIFFERENT in report.note)


if __name__ == "__main__":
    raise SystemExit(main())
