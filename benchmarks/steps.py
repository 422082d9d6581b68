"""What benchmarks of training steps share: the work of a step, its FLOPs, made-up samples, quick weights, a rank of the
plugin, a clock.

Model FLOPs of an optimizer step, as in `flops`: 6 N T + 6 L H sum(s^2). N are the parameters in the matrices that a
token passes through: all except the embedding, and of the experts the chosen ones. The second term is causal attention:
12 L H T s / 2 for T tokens in sequences of s each, with H the width of all query heads together. Recomputation is not
counted. MFU is these FLOPs over seconds x GPUs x 989 TFLOP/s, the dense bf16 peak of an H100 or H200, also for FP8.

Run as a program, it is a rank that `in_ranks` has started.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pickle
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from torch import Tensor

from benchmarks.report import commit
from benchmarks.shapes import tiny_shape
from corerl.config.schema import ClusterInfo, OptimizerConfig, TrainConfig, WeightsConfig
from corerl.config.structuring import structure
from corerl.data.packing import pack, plan_steps
from corerl.memory.device import lone_rank_options
from corerl.plugin.registry import Kind, load
from corerl.trainer.worker import Worker
from corerl.types import (
    IntArray,
    LossSpec,
    MicroBatch,
    Output,
    PackedBatch,
    ParallelLayout,
    SampleBatch,
    Step,
    offsets_of,
)
from corerl.weights.chunks import Chunk
from corerl_testing.harness import Setup, make_worker

PEAK = 989e12  # FLOP/s
GIB = 2**30
CLIP, ENTROPY = 0.2, 0.01
GROUP = 8  # samples of one prompt
OPTIMIZER = OptimizerConfig(lr=1e-6, clip_norm=1.0)
ENDED_WITHIN = 45.0  # seconds, of which torchrun gives its ranks 30
TIMEOUT = 600.0  # seconds that a rank waits for another: the first step compiles


@frozen(kw_only=True)
class Work:
    """A model, how it is laid out, the samples of one step, and who trains it."""

    what: str
    fields: Mapping[str, Any]  # of the model's config
    backend: str = "fsdp"
    loop: str = "plugin"  # or a bare loop: "bare", and of FSDP's those in `bare.PASSES`
    options: Mapping[str, Any] = field(factory=dict)  # the backend's, or the bare loop's
    ranks: int = 1
    precision: str = "bfloat16"
    recompute: str = "none"
    layout: str = "auto"
    sequence: int = 2048  # tokens of each sample
    lengths: tuple[int, ...] = ()  # of each sample, where they differ; `sequence` and `micro_batches` do not count then
    tokens: int = 8192  # of a micro-batch, on each dp rank
    micro_batches: int = 2  # of a step, on each dp rank
    group: int = 0  # samples with the same prompt
    prompt: int = 0  # tokens of it; 0: an eighth of the shortest sample
    share_prefixes: bool = False
    device: str = "cuda"

    def samples(self, dp_size: int) -> IntArray:
        """[B] tokens of each sample of a step."""
        if self.lengths:
            return np.array(self.lengths)
        return np.full(self.tokens // self.sequence * self.micro_batches * dp_size, self.sequence)

    def loss(self, *, entropy: bool = False) -> LossSpec:
        return LossSpec(
            name="clipped",
            params={"clip_low": CLIP, "clip_high": CLIP, "entropy_coef": ENTROPY if entropy else 0.0},
            outputs=(Output.LOGPROBS, Output.ENTROPY) if entropy else (Output.LOGPROBS,),
        )

    @property
    def tiny(self) -> Work:
        """The same work in a size for CPUs, where nothing is compiled: that takes a minute and says nothing."""
        options = {name: value for name, value in self.options.items() if name not in ("fp8", "fp8_recipe")}
        options |= {"compile": False} if self.backend == "fsdp" else {}
        options |= {"transformer": "torch"} if self.backend == "megatron" and self.loop == "plugin" else {}
        lengths = tuple(max(4, length // 16) for length in self.lengths[:40])
        tokens = max(sum(lengths) // 2, *lengths) if lengths else 32 * (self.tokens // self.sequence)
        return evolve(
            self,
            fields=tiny_shape(self.fields),
            options=options,
            precision="float32",
            sequence=32,
            lengths=lengths,
            prompt=self.prompt // 16,
            tokens=tokens,
            device="cpu",
        )


def flops(fields: Mapping[str, Any], lengths: IntArray) -> float:
    """Of the model, forward and back, for one step on sequences of `lengths` [B] tokens; the formula stands above."""
    hidden, layers = fields["hidden_size"], fields["num_hidden_layers"]
    queries, keys = (fields[name] * fields["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    attention = hidden * (queries + 2 * keys) + queries * hidden
    if experts := fields.get("num_experts"):
        mlp = 3 * hidden * fields["moe_intermediate_size"] * fields["num_experts_per_tok"] + hidden * experts
    else:
        mlp = 3 * hidden * fields["intermediate_size"]
    matrices = layers * (attention + mlp) + fields["vocab_size"] * hidden
    exact = lengths.astype(np.float64)
    return float(6 * matrices * exact.sum() + 6 * layers * queries * (exact**2).sum())


class QuickWeights:
    """Random weights, made on the device where they are used, the same for every layout: a tensor is made whole, by
    its name, and cut. CoreRL's own source makes each value by its place, on the CPU.

    All are numbers of bfloat16: from others float32 masters would not begin where the bare loop's begin."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self._shapes, self._device = shapes, device

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if len(sizes) < 2:
            return torch.ones(tuple(sizes), device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(self._shapes[name], generator=generator, device=self._device, dtype=torch.bfloat16)
        box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        return (whole[box] * 0.02).float()

    def whole(self, name: str) -> Tensor:
        shape = self._shapes[name]
        return self.read(name, [0] * len(shape), shape)


def quick_worker(setup: Setup, **more: Any) -> Worker:
    """A rank of a run, without Ray, with quick weights. `more` changes what a run says to its workers."""
    worker = make_worker(setup)
    worker.config = evolve(worker.config, timeout=TIMEOUT, **more)

    def weights(chunks: Sequence[Chunk]) -> QuickWeights:
        return QuickWeights({chunk.name: chunk.shape for chunk in chunks}, worker.backend.device)

    with mock.patch.object(worker.backend, "initial_weights", weights):
        worker.init("127.0.0.1", 0)
    return worker


class Plugin:
    """The worker of one rank, which trains."""

    def __init__(self, work: Work) -> None:
        self._work = work
        setup = Setup(backend=work.backend, model="", fields=work.fields, options=work.options, device=work.device)
        self.worker = quick_worker(evolve(setup, train=train_config(work), weights=WeightsConfig()))
        self.layout = self.worker.backend.layout
        self._steps = 0

    @property
    def batch(self) -> PackedBatch:
        """This rank's share of a step."""
        own = self.layout
        multiple = own.sequence_multiple
        return packed_batch(self._work, dp_rank=own.dp_rank, dp_size=own.dp_size, sequence_multiple=multiple)

    def train(self, batch: PackedBatch, *, entropy: bool = False) -> float:
        """The gradient's norm before it is clipped."""
        step = Step(optimizer_step=self._steps, rollout_step=self._steps, lr=OPTIMIZER.lr)
        self._steps += 1
        return self.worker.train_on(batch=batch, loss=self._work.loss(entropy=entropy), step=step).grad_norm

    def close(self) -> None:
        self.worker.shutdown("measured")


def train_config(work: Work) -> TrainConfig:
    return TrainConfig(
        tokens_per_micro_batch=work.tokens,
        precision=work.precision,  # type: ignore[arg-type]  # a name, as of every case
        recompute=work.recompute,  # type: ignore[arg-type]
        layout=work.layout,  # type: ignore[arg-type]
        share_prefixes=work.share_prefixes,
        optimizer=OPTIMIZER,
    )


def make_batch(lengths: IntArray, *, prompt: int, vocab: int, group: int = 0, seed: int = 0) -> SampleBatch:
    """Samples of `lengths` tokens, the first `prompt` of each its prompt; nothing temporary is as large as a column.
    With a `group`, so many samples have the same prompt; otherwise no two have."""
    rng = np.random.default_rng(seed)
    offsets = offsets_of(lengths)
    total = int(offsets[-1])
    mask = np.ones(total, dtype=np.bool_)
    mask[(offsets[:-1, None] + np.arange(prompt)).ravel()] = False
    logprobs = rng.standard_normal(total, dtype=np.float32)
    logprobs *= 0.3
    logprobs -= np.float32(np.log(vocab))
    logprobs *= mask
    advantages = np.repeat(rng.standard_normal(len(lengths), dtype=np.float32), lengths)
    advantages *= mask
    tokens = rng.integers(3, vocab, total)
    for sample in range(len(lengths)) if group else ():
        first = offsets[sample // group * group]
        tokens[offsets[sample] : offsets[sample] + prompt] = tokens[first : first + prompt]
    return SampleBatch(
        tokens=tokens,
        offsets=offsets,
        columns={
            "loss_mask": mask,
            "rollout_logprobs": logprobs,
            "old_logprobs": logprobs.copy(),
            "advantages": advantages,
            "versions": np.full(total, 1, dtype=np.int64),
        },
        row_columns={"group": np.arange(len(lengths)) // (group or GROUP)},
    )


def packed_batch(work: Work, *, dp_rank: int, dp_size: int, sequence_multiple: int = 1) -> PackedBatch:
    """A dp rank's share of a step, packed once."""
    lengths = work.samples(dp_size)
    prompt = work.prompt or max(1, int(lengths.min()) // 8)
    samples = make_batch(lengths, prompt=prompt, vocab=work.fields["vocab_size"], group=work.group)
    (plan,) = plan_steps(  # all samples are one optimizer step
        samples,
        ParallelLayout.data_parallel(rank=0, world_size=dp_size, shares_prefixes=work.share_prefixes),
        tokens_per_micro_batch=work.tokens,
        aggregation="token-mean",
        max_tokens=1,
        seed=0,
    )
    batch = pack(samples, plan.shard_of(dp_rank), sequence_multiple=sequence_multiple)
    if not work.lengths and (batch.count != work.micro_batches or work.sequence % sequence_multiple):
        raise ValueError(
            f"{batch.count} micro-batches of sequences padded to {sequence_multiple}; the case wants "
            f"{work.micro_batches} without padding"
        )
    return evolve(batch, micro_batches=list(batch.micro_batches))


def clipped_loss(logprobs: Tensor, entropy: Tensor | None, micro: MicroBatch, device: torch.device) -> Tensor:
    """A bare loop's, of log-probs (and entropy) [T - 1] of each token that has one before it."""
    names = ("old_logprobs", "advantages", "weights")
    old, advantages, weights = (torch.tensor(micro.columns[name], device=device)[1:] for name in names)
    ratio = (logprobs - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1.0 - CLIP, 1.0 + CLIP) * advantages)
    if entropy is not None:
        gain = gain + ENTROPY * entropy
    return -(weights * gain).sum()


# ---- a clock, and memory ---------------------------------------------------------------------------------------------


def timed(
    device: torch.device, call: Callable[[], object], peaks: dict[str, float] | None = None, who: str = ""
) -> float:
    """Seconds of a call that all ranks begin together, until the last one is done on its device."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        if peaks is not None:
            torch.cuda.reset_peak_memory_stats(device)
    meet(device)
    began = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize(device)
        if peaks is not None:
            peaks[who] = max(peaks.get(who, 0.0), torch.cuda.max_memory_allocated(device))
    meet(device)
    return time.perf_counter() - began


def meet(device: torch.device) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros((), device=device))
        synchronize(device)


def device_of(work: Work) -> torch.device:
    return torch.device(work.device, torch.cuda.current_device()) if work.device == "cuda" else torch.device("cpu")


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def used(device: torch.device) -> int:
    """Bytes of the device that are in use, as its driver says."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- a process of a benchmark ----------------------------------------------------------------------------------------


def facts(work: Work, *packages: str) -> dict[str, str]:
    """Versions of Python, CoreRL, torch and those `packages` that are installed, and of which GPUs there are."""
    found = {"Python": platform.python_version(), "CoreRL": commit()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if work.device == "cuda":
        found["GPU"] = f"{torch.cuda.get_device_name()} x {dist.get_world_size()}"
        found["NCCL_NVLS_ENABLE"] = os.environ.get("NCCL_NVLS_ENABLE", "unset")
    return found


def environment(work: Work) -> Mapping[str, str]:
    """What a run would give each of its processes. Ends the program where the spec has objections."""
    loaded = load(Kind.BACKENDS, work.backend)
    config = structure(dict(work.options), loaded.spec.config, path=f"backends.{work.backend}")
    cluster = ClusterInfo(device=work.device, ranks=work.ranks, model=work.fields)
    if problems := list(loaded.spec.check(config, cluster)):
        sys.exit("; ".join(f"{problem.path}: {problem.text}" for problem in problems))
    return loaded.spec.environment(config, cluster)


def in_ranks(call: str, *args: Any, work: Work, limit: float) -> Any:
    """What `call`, a 'module:function', returns on the first of the work's ranks, in processes of their own, in which
    it has to `join`. Raises RuntimeError if one fails, or is not done after `limit` seconds. `work` is the plugin's.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(work.ranks)]
    threads = max(1, (os.cpu_count() or 1) // work.ranks)  # AdamW's, where it is on the host
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        asked, answer = Path(directory) / "asked", Path(directory) / "answer"
        asked.write_bytes(pickle.dumps((call, args)))
        command = [sys.executable, *(launcher if work.ranks > 1 else []), "-m", "benchmarks.steps"]
        env = {"OMP_NUM_THREADS": str(threads), **environment(work), **os.environ}
        process = subprocess.Popen([*command, str(asked), str(answer)], env=env, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # ranks have sessions of their own: torchrun ends them
            try:
                process.wait(ENDED_WITHIN)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise RuntimeError(f"it was not done after {limit:.0f} s") from None
        if code:
            raise RuntimeError(f"exit status {code}")
        return pickle.loads(answer.read_bytes())


def main(asked: str, answer: str) -> None:
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it
    warnings.filterwarnings("ignore", category=FutureWarning)  # of names that DeepSpeed calls and torch will change
    call, args = pickle.loads(Path(asked).read_bytes())
    module, _, function = call.partition(":")
    found = getattr(importlib.import_module(module), function)(*args)
    if dist.get_rank() == 0:
        Path(answer).write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def join(work: Work) -> None:
    """This process takes its place: in the group of a torchrun, or alone."""
    if work.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=TIMEOUT)
    backend = "gloo" if work.device == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timeout)
        options = lone_rank_options(timeout) if work.device == "cuda" else None  # as a run's worker
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, pg_options=options)


if __name__ == "__main__":
    from benchmarks import steps  # not as __main__: what is pickled here names its module

    steps.main(*sys.argv[1:])
