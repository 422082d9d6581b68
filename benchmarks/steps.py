"""What benchmarks of training steps share: model shapes, their FLOPs, quick weights, a rank of the plugin, a clock.

Model FLOPs of an optimizer step, as in `flops`: 6 N T + 6 L H sum(s^2). N are the parameters in the matrices that a
token passes through: all except the embedding, and of the experts the chosen ones. The second term is causal attention:
12 L H T s / 2 for T tokens in sequences of s each, with H the width of all query heads together. Recomputation is not
counted. MFU is these FLOPs over seconds x GPUs x 989 TFLOP/s, the dense bf16 peak of an H100 or H200, also for FP8.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from torch import Tensor

from benchmarks.report import commit
from benchmarks.samples import make_batch, plan_one_step
from corerl.config.schema import ClusterInfo, LoraConfig, OptimizerConfig, TrainConfig, WeightsConfig
from corerl.config.structuring import structure
from corerl.data.packing import pack
from corerl.memory.cache import lone_rank_options
from corerl.plugin.registry import Kind, load
from corerl.types import IntArray, LossSpec, MicroBatch, Output, PackedBatch, Step
from corerl.weights.chunks import Chunk
from corerl_testing.harness import Setup, make_worker

PEAK = 989e12  # FLOP/s
GIB = 2**30
CLIP, ENTROPY = 0.2, 0.01
OPTIMIZER = OptimizerConfig(lr=1e-6, clip_norm=1.0)
ENDED_WITHIN = 45.0  # seconds, of which torchrun gives its ranks 30
TIMEOUT = 600.0  # seconds that a rank waits for another: the first step compiles
TARGET = 0.97  # of the bare loop's tokens a second
DIFFERENT = "THE FIRST GRADIENTS DIFFER: the two sides do not do the same work, so the ratio is meaningless."

COMMON = {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_8B = {
    **COMMON,
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
}
QWEN3_600M = {
    **QWEN3_8B,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
SLICE = {**QWEN3_8B, "num_hidden_layers": 8}  # 2.79 B parameters
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
TINY_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


@frozen(kw_only=True)
class Work:
    """A model, how it is laid out, and the samples of one step."""

    what: str
    fields: Mapping[str, Any]  # of the model's config
    ranks: int = 1
    options: Mapping[str, Any] = field(factory=dict)  # the backend's own
    precision: str = "bfloat16"
    recompute: str = "none"
    layout: str = "auto"
    sequence: int = 2048  # tokens of each sample
    tokens: int = 8192  # of a micro-batch, on each dp rank
    micro_batches: int = 2  # of a step, on each dp rank
    device: str = "cuda"
    lora: LoraConfig | None = None  # the adapters that are trained

    def samples(self, dp_size: int) -> IntArray:
        """[B] tokens of each sample of a step."""
        return np.full(self.tokens // self.sequence * self.micro_batches * dp_size, self.sequence)

    def loss(self, *, entropy: bool) -> LossSpec:
        return LossSpec(
            name="clipped",
            params={"clip_low": CLIP, "clip_high": CLIP, "entropy_coef": ENTROPY if entropy else 0.0},
            outputs=(Output.LOGPROBS, Output.ENTROPY) if entropy else (Output.LOGPROBS,),
        )

    def on_cpu(self) -> dict[str, Any]:
        """What differs where the same work is done tiny, on a CPU."""
        sequence = 32
        return {
            "fields": {**self.fields, **TINY, **(TINY_EXPERTS if "num_experts" in self.fields else {})},
            "precision": "float32",
            "sequence": sequence,
            "tokens": sequence * (self.tokens // self.sequence),
            "device": "cpu",
        }


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
    """Random weights, drawn on the device where they are used, the same for every layout: a tensor is drawn whole, by
    its name, and cut. CoreRL's own source draws each value by its place, on the CPU.

    All are numbers of bfloat16: from others float32 masters would begin beside what the bare loop's begin at."""

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


class Plugin:
    """A rank of a run, without Ray: CoreRL's worker with the backend in it."""

    def __init__(self, backend: str, work: Work, options: Mapping[str, Any]) -> None:
        setup = Setup(
            backend=backend,
            model="",
            fields=work.fields,
            train=TrainConfig(
                tokens_per_micro_batch=work.tokens,
                precision=work.precision,  # type: ignore[arg-type]  # a name, as of every case
                recompute=work.recompute,  # type: ignore[arg-type]
                layout=work.layout,  # type: ignore[arg-type]
                optimizer=OPTIMIZER,
            ),
            options=options,
            weights=WeightsConfig(),
            device=work.device,
            lora=work.lora,
        )
        self.worker = make_worker(setup)
        self.worker.config = evolve(self.worker.config, timeout=TIMEOUT)
        with mock.patch.object(self.worker.backend, "initial_weights", self._weights):
            self.layout = self.worker.init("127.0.0.1", 0).layout
        self._steps = 0

    def _weights(self, chunks: Sequence[Chunk]) -> QuickWeights:
        return QuickWeights({chunk.name: chunk.shape for chunk in chunks}, self.worker.backend.device)

    def train(self, batch: PackedBatch, loss: LossSpec) -> float:
        """The gradient's norm before it is clipped."""
        step = Step(optimizer_step=self._steps, rollout_step=self._steps, lr=OPTIMIZER.lr)
        self._steps += 1
        return self.worker.train_on(batch=batch, loss=loss, step=step).grad_norm


def packed_batch(work: Work, *, dp_rank: int, dp_size: int, sequence_multiple: int = 1) -> PackedBatch:
    """A dp rank's share of a step, its micro-batches made once."""
    samples = make_batch(work.samples(dp_size), prompt=work.sequence // 8, vocab=work.fields["vocab_size"])
    plan = plan_one_step(samples, dp_size=dp_size, tokens_per_micro_batch=work.tokens)
    batch = pack(samples, plan.share(dp_rank), sequence_multiple=sequence_multiple)
    if batch.count != work.micro_batches or work.sequence % sequence_multiple:
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
    if dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros((), device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def device_of(work: Work) -> torch.device:
    return torch.device(work.device, torch.cuda.current_device()) if work.device == "cuda" else torch.device("cpu")


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def outside(device: torch.device) -> float:
    """GiB of the device that are in use and not torch's: the context, loaded kernels, NCCL's buffers."""
    if device.type == "cpu":
        return 0.0
    torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / GIB


# ---- a process of a benchmark ----------------------------------------------------------------------------------------


def facts(work: Work, *packages: str) -> dict[str, str]:
    """Versions of Python, CoreRL, torch and those `packages` that are installed, and of which GPUs there are."""
    found = {"Python": platform.python_version(), "CoreRL": commit() if shutil.which("git") else "unknown"}
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


def environment(backend: str, work: Work, options: Mapping[str, Any]) -> Mapping[str, str]:
    """What a run would give each of its processes. Ends the program where the spec has objections."""
    loaded = load(Kind.BACKENDS, backend)
    config = structure(dict(options), loaded.spec.config, path=f"backends.{backend}")
    cluster = ClusterInfo(device=work.device, ranks=work.ranks, model=work.fields)
    if problems := list(loaded.spec.check(config, cluster)):
        sys.exit("; ".join(f"{problem.path}: {problem.text}" for problem in problems))
    return loaded.spec.environment(config, cluster)


def run_ranks(command: Sequence[str], *, more: Mapping[str, str], limit: float) -> str:
    """Start a program, maybe a torchrun's, in this environment with `more`: why it failed, "" where it did not. It is
    ended after `limit` seconds, and its ranks with it."""
    process = subprocess.Popen(command, env={**more, **os.environ}, start_new_session=True)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.terminate()  # ranks have sessions of their own: torchrun ends them
        try:
            process.wait(ENDED_WITHIN)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return f"it was not done after {limit:.0f} s"
    return "" if code == 0 else f"exit status {code}"


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
