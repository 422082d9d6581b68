"""Measure the Megatron backend on GPUs: a training step against a bare megatron-core loop, and multi-rank layouts.

python -m benchmarks.megatron bf16 --output found/bf16.json
python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.megatron tp2-dp2 --overlap
python -m benchmarks.megatron --table found/*.json

Each start runs one of `CASES`, with one process per GPU; `--tiny` runs it on a CPU, to check that everything works.
Start it with `-m`: run as a file, it would shadow megatron-core's own package `megatron`. `steps` defines FLOPs and
MFU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import asdict, evolve, frozen
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from benchmarks.report import Comparison, Number, Report, in_turns, spread, table
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
    Work,
    allocated,
    clipped_loss,
    device_of,
    environment,
    facts,
    flops,
    join,
    outside,
    packed_batch,
    timed,
)
from corerl.ops.attention import PackedSequences
from corerl.ops.logprobs import token_logprobs
from corerl.types import MemoryKind, MicroBatch, PackedBatch, SleepResult
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import WeightSender

HEAD = "head"  # the case of the log-probs alone

QWEN3_30B_A3B = {
    **COMMON,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}


@frozen(kw_only=True)
class Case(Work):
    """And what it is measured beside."""

    bare: Mapping[str, Any] | None = None  # a bare loop, with these arguments of TransformerConfig more

    @property
    def tiny(self) -> Case:
        """The same case for the CPU."""
        options = {name: value for name, value in self.options.items() if not name.startswith("fp8")}
        bare: dict[str, Any] | None = None if self.bare is None else {}
        return evolve(self, **self.on_cpu(), options={**options, "transformer": "torch"}, bare=bare)


BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed"}
# What Megatron can fuse beyond what the plugin asks for; it compiles this with torch.compile.
FUSED = {"bias_dropout_fusion": True}

CASES = {
    "bf16": Case(what="bf16, micro-batches of 8k", fields=SLICE, bare={}),
    "bf16-16k": Case(what="bf16, a micro-batch of 16k", fields=SLICE, tokens=16384, micro_batches=1, bare={}),
    "bf16-fused": Case(what="bf16, the bare loop with more fusions", fields=SLICE, bare=FUSED),
    "bf16-torch": Case(what="bf16, without TransformerEngine", fields=SLICE, options={"transformer": "torch"}),
    "fp8": Case(what="FP8 e4m3 by blocks", fields=SLICE, options=BLOCKWISE, bare=BLOCKWISE),
    "fp8-delayed": Case(what="FP8 hybrid, delayed scales", fields=SLICE, options=DELAYED, bare=DELAYED),
    "tp2": Case(
        what="8B shape, tp=2 with sequence parallel",
        fields=QWEN3_8B,
        ranks=2,
        options={"tensor_parallel": 2, "sequence_parallel": True},
        micro_batches=4,
    ),
    "pp2": Case(
        what="8B shape, pp=2",
        fields=QWEN3_8B,
        ranks=2,
        options={"pipeline_parallel": 2},
        micro_batches=8,
    ),
    "cp2": Case(
        what="8B shape, cp=2, one sequence of 32k a micro-batch, layers recomputed",
        fields=QWEN3_8B,
        ranks=2,
        options={"context_parallel": 2},
        recompute="full",
        sequence=32768,
        tokens=32768,
    ),
    "ep2": Case(
        what="8 layers of the 30B-A3B shape, ep=2, dp=2",
        fields={**QWEN3_30B_A3B, "num_hidden_layers": 8},
        ranks=2,
        options={"expert_parallel": 2},
    ),
    "tp2-dp2": Case(
        what="8B shape, tp=2 with sequence parallel, dp=2",
        fields=QWEN3_8B,
        ranks=4,
        options={"tensor_parallel": 2, "sequence_parallel": True},
        micro_batches=4,
    ),
    "tp2-pp2": Case(
        what="8B shape, tp=2 with sequence parallel, pp=2",
        fields=QWEN3_8B,
        ranks=4,
        options={"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2},
        micro_batches=8,
    ),
    "tp2-pp2-vpp2": Case(
        what="8B shape, tp=2 with sequence parallel, pp=2 of two interleaved parts each",
        fields=QWEN3_8B,
        ranks=4,
        options={"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2, "virtual_pipeline": 2},
        micro_batches=8,
    ),
    "cp2-dp2": Case(
        what="8B shape, cp=2, dp=2, one sequence of 32k a micro-batch, layers recomputed",
        fields=QWEN3_8B,
        ranks=4,
        options={"context_parallel": 2},
        recompute="full",
        sequence=32768,
        tokens=32768,
    ),
    "ep4": Case(
        what="16 layers of the 30B-A3B shape, ep=4, dp=4",
        fields={**QWEN3_30B_A3B, "num_hidden_layers": 16},
        ranks=4,
        options={"expert_parallel": 4},
    ),
}


def switches(*, overlap: bool) -> dict[str, Any]:
    return {"overlap_grad_reduce": True, "overlap_param_gather": True} if overlap else {}


class NowhereSender(WeightSender):
    """One rank gathers every bucket, and no engine takes it."""

    def open(self, manifest: Manifest, version: int) -> None: ...

    def send(self, bucket: Bucket, flat: Tensor) -> None: ...

    def finish(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None: ...


class HiddenStates(GPTModel):
    """megatron-core's model up to its final norm."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class Bare:
    """A loop as one writes it by hand with megatron-core, on one rank, around CoreRL's kernel for log-probs.

    Of the plugin it has nothing but what a CPU needs, and its process groups. Called with the plugin's model there.
    """

    def __init__(self, case: Case, weights: Mapping[str, Tensor], device: torch.device) -> None:
        hf, dtype, self._device = case.fields, getattr(torch, case.precision), device
        on_gpu = device.type == "cuda"
        config = TransformerConfig(
            num_layers=hf["num_hidden_layers"],
            hidden_size=hf["hidden_size"],
            ffn_hidden_size=hf["intermediate_size"],
            num_attention_heads=hf["num_attention_heads"],
            num_query_groups=hf["num_key_value_heads"],
            kv_channels=hf["head_dim"],
            layernorm_epsilon=hf["rms_norm_eps"],
            normalization="RMSNorm",
            qk_layernorm=True,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            use_cpu_initialization=not on_gpu,
            perform_initialization=False,
            gradient_accumulation_fusion=False,  # its kernel comes with Apex
            apply_rope_fusion=on_gpu,
            bias_activation_fusion=on_gpu,
            **{"persist_layer_norm": False, "bias_dropout_fusion": False, **(case.bare or {})},
        )
        config.finalize_model_grads_func = finalize_model_grads
        model = HiddenStates(
            config,
            _layers(config, on_gpu=on_gpu),
            vocab_size=hf["vocab_size"],
            max_sequence_length=hf["max_position_embeddings"],
            position_embedding_type="rope",
            rotary_base=hf["rope_parameters"]["rope_theta"],
            share_embeddings_and_output_weights=False,
        ).to(device)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(weights[name])
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self._model = DistributedDataParallel(config, buffers, model)
        self._head = model.output_layer.weight
        self._optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=OPTIMIZER.lr,
                adam_beta1=OPTIMIZER.betas[0],
                adam_beta2=OPTIMIZER.betas[1],
                adam_eps=OPTIMIZER.eps,
                weight_decay=OPTIMIZER.weight_decay,
                clip_grad=OPTIMIZER.clip_norm,
                bf16=dtype is torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
            ),
            [self._model],
            use_gloo_process_groups=False,
        )

    def train(self, batch: PackedBatch, *, entropy: bool) -> float:
        """The gradient's norm before it is clipped."""
        self._model.train()
        self._model.zero_grad_buffer()
        forward_backward_no_pipelining(
            forward_step_func=lambda micro_batches, model: self._forward(next(micro_batches), model, batch, entropy),
            data_iterator=iter(batch.micro_batches),
            model=self._model,
            num_microbatches=batch.count,
            seq_length=1,  # not read
            micro_batch_size=1,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr
        _, norm, _ = self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)

    def _forward(self, micro: MicroBatch, model: Any, batch: PackedBatch, entropy: bool) -> tuple[Tensor, Any]:
        tokens, positions = (torch.tensor(x, device=self._device) for x in (micro.tokens, micro.positions))

        def loss(hidden: Tensor) -> tuple[Tensor, dict[str, Any]]:
            # Behind a sequence's last token another one begins, at a token without a weight.
            targets = torch.cat([tokens[1:], tokens[:1]])
            logprobs, bonus = token_logprobs(
                hidden[:, 0], self._head, targets, temperature=batch.temperature, with_entropy=entropy
            )
            following = None if bonus is None else bonus[:-1]
            # megatron-core divides by the number of micro-batches.
            return clipped_loss(logprobs[:-1], following, micro, self._device) * batch.count, {}

        return model(tokens[None], positions[None], None, packed_seq_params=_packed(micro, self._device)), loss


def _layers(config: TransformerConfig, *, on_gpu: bool) -> Any:
    if not on_gpu:
        from corerl_megatron.layers import torch_layers

        return torch_layers(config, vp_stage=None)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)


def _packed(micro: MicroBatch, device: torch.device) -> PackedSeqParams:
    if device.type == "cpu":
        from corerl_megatron.packed import packed_params

        positions = torch.tensor(micro.positions, device=device)
        return packed_params(PackedSequences.of(micro.cu_seqlens, device), None, positions)
    bounds = torch.tensor(micro.cu_seqlens, dtype=torch.int32, device=device)
    longest = int(np.diff(micro.cu_seqlens).max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


# ---- measuring -------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Laid:
    """What one layout was found to do. Seconds, GiB and gradient norms; lists by rank or by round."""

    name: str
    what: str
    overlap: bool
    ranks: int
    tokens: int  # of a step, on all ranks
    flops: float  # of a step
    steps: list[float]  # seconds, one a round
    peaks: list[float]  # GiB that torch held at most, by rank
    outside: list[list[float]]  # GiB of the device that are not torch's, by rank: at first, after init, after all steps
    updates: list[float]  # seconds of each gather of all weights to rank 0
    update_bytes: int
    sleeps: list[list[float]]  # of each: seconds, GiB freed, GiB left, seconds to wake; the slowest rank's, rank 0's
    norms: list[float]  # of the first gradients, and of one after the last wake-up
    facts: Mapping[str, str]

    def row(self) -> list[str]:
        k = [self.tokens / each / 1e3 for each in self.steps]
        mfu = [100 * self.flops / each / self.ranks / PEAK for each in self.steps]
        first, _, last = (max(at) for at in zip(*self.outside, strict=True))
        update = f"{self.updates[-1]:.3f} s, {self.update_bytes / 1e9:.1f} GB" if self.updates else ""
        sleep = ""
        if self.sleeps:
            down, freed, left, up = self.sleeps[-1]
            sleep = f"{down:.1f} s, {freed:.1f} GiB freed, {left:.1f} left; {up:.1f} s to wake"
        return [
            f"{self.name}: {self.what}",
            "yes" if self.overlap else "no",
            f"{self.tokens / 1024:g}k",
            spread(self.steps, "s"),
            spread(k, "k"),
            f"{statistics.median(mfu):.1f} %",
            f"{max(self.peaks):.1f} GiB (least {min(self.peaks):.1f})",
            f"{first:.2f} to {last:.2f} GiB",
            update,
            sleep,
        ]


LAID_HEAD = (
    "| layout | overlap | tokens a step | step | tokens/s | MFU | peak of a rank | outside torch, at first to last "
    "| weights to one rank | sleep, wake-up |\n" + "|---" * 10 + "|"
)


@frozen
class Turns:
    """What plugin and bare loop did in turns."""

    ours: list[float]  # seconds, one a round
    other: list[float]
    norms: tuple[list[float], list[float]]  # of every step's gradient, the plugin's and the bare loop's
    peaks: Mapping[str, float]  # bytes that torch held at most while each ran, with both models there


def take_turns(plugin: Plugin, bare: Bare, case: Case, batch: PackedBatch, *, entropy: bool, rounds: int) -> Turns:
    """The same micro-batches; two rounds warm up."""
    from corerl_megatron.adam import fused_adam
    from corerl_megatron.on_host import calling_megatron

    device = device_of(case)
    loss = case.loss(entropy=entropy)
    norms: tuple[list[float], list[float]] = ([], [])
    peaks: dict[str, float] = {}

    def ours(number: int) -> float:
        return timed(device, lambda: norms[0].append(plugin.train(batch, loss)), peaks, "plugin")

    def other(number: int) -> float:
        def call() -> None:
            with calling_megatron(device), fused_adam():  # both nothing on a GPU with TransformerEngine
                norms[1].append(bare.train(batch, entropy=entropy))

        return timed(device, call, peaks, "bare loop")

    in_turns(2, ours, other)
    mine, its = in_turns(rounds, ours, other)
    return Turns(mine, its, norms, peaks)


BARE_NOTE = (
    "One optimizer step from micro-batches on the host: forward, clipped loss over per-token log-probs, backward, "
    "clipping, the distributed optimizer. The plugin's side is both halves of a step through the worker's host, with "
    "metrics; the bare loop uses the same kernel for log-probs and computes no metric."
)


def measure_bare(case: Case, *, name: str, rounds: int) -> Report:
    """With entropy off, then on."""
    from corerl_megatron.adam import fused_adam
    from corerl_megatron.on_host import calling_megatron

    device = device_of(case)
    plugin = Plugin("megatron", case, case.options)
    held = allocated(device)
    with calling_megatron(device), fused_adam():
        (chunk,) = plugin.worker.backend.model.chunks  # type: ignore[attr-defined]  # the Megatron backend's
        bare = Bare(case, dict(chunk.module.named_parameters()), device)
    lengths = case.samples(1)
    batch = batch_of(plugin, case)
    tokens, work = int(lengths.sum()), flops(case.fields, lengths)
    comparisons, numbers, notes = [], [], []
    for entropy in (False, True):
        turns = take_turns(plugin, bare, case, batch, entropy=entropy, rounds=rounds)
        what = f"{case.what}{', with entropy' if entropy else ''}"
        comparisons.append(
            Comparison(
                what=f"a step of {tokens} tokens, {what}",
                against="bare megatron-core",
                ours=turns.ours,
                other=turns.other,
                target=None if entropy else round(1 / TARGET, 3),
            )
        )
        for who, seconds in (("the plugin", turns.ours), ("bare megatron-core", turns.other)):
            k = [tokens / each / 1e3 for each in seconds]
            mfu = [100 * work / each / PEAK for each in seconds]
            numbers.append(Number(what=f"{who}: tokens a second, {what}", values=k, unit="k"))
            numbers.append(Number(what=f"{who}: MFU, {what}", values=mfu, unit="%"))
        # Both are graphs of the same kernels; what they round differs, and grows from step to step.
        close = np.allclose(turns.norms[0][:2], turns.norms[1][:2], rtol=1e-3 if case.precision == "float32" else 5e-2)
        if not close:
            notes.append(DIFFERENT)
        first = "; ".join(f"{a:.5g} and {b:.5g}" for a, b in zip(*turns.norms, strict=True))
        notes.append(f"Gradient norms{' with entropy' if entropy else ''}, plugin and bare loop: {first}.")
        if held:
            both = ", ".join(f"{who} {peak / GIB:.1f} GiB" for who, peak in turns.peaks.items())
            notes.append(f"Torch's peak while each ran, with both models in memory: {both}.")
    if held:
        notes.append(f"Before its first step the plugin held {held / GIB:.1f} GiB.")
    return Report(
        name=name,
        size=(
            f"{case.fields['num_hidden_layers']} layers, {case.micro_batches} micro-batches a step of {case.tokens} "
            f"tokens in sequences of {case.sequence}"
        ),
        comparisons=comparisons,
        numbers=numbers,
        note=" ".join([BARE_NOTE, *notes]),
        versions=measured_with(case),
    )


def measure_layout(case: Case, name: str, rounds: int, overlap: bool, sleep: bool) -> Laid:
    """Called on every rank; the result is rank 0's."""
    device = device_of(case)
    beyond = [outside(device)]
    plugin = Plugin("megatron", case, {**case.options, **switches(overlap=overlap)})
    beyond.append(outside(device))
    batch = batch_of(plugin, case)
    loss = case.loss(entropy=False)
    norms = [plugin.train(batch, loss) for _ in range(2)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    steps = [timed(device, lambda: norms.append(plugin.train(batch, loss))) for _ in range(rounds)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    beyond.append(outside(device))

    host, sender = plugin.worker.host, NowhereSender()
    sent: list[int] = []

    def update() -> None:
        version = len(sent) + 1
        sent.append(host.update_weights(sender=sender, version=version).bytes)

    updates = [timed(device, update) for _ in range(3)]
    slept: list[SleepResult] = []

    def fall_asleep() -> None:
        slept.append(host.sleep(kinds=frozenset(MemoryKind)))

    sleeps = []
    for _ in range(2 if sleep else 0):  # the first one pins host memory
        down = timed(device, fall_asleep)
        up = timed(device, lambda: host.wake_up(kinds=frozenset(MemoryKind)))
        sleeps.append([down, slept[-1].freed_bytes / GIB, slept[-1].residual_bytes / GIB, up])
    norms.append(plugin.train(batch, loss))

    ranks = [(peak / GIB, beyond)] * dist.get_world_size()
    dist.all_gather_object(ranks, (peak / GIB, beyond))
    lengths = case.samples(plugin.layout.dp_size)
    found = Laid(
        name=name,
        what=case.what,
        overlap=overlap,
        ranks=len(ranks),
        tokens=int(lengths.sum()),
        flops=flops(case.fields, lengths),
        steps=steps,
        peaks=[each for each, _ in ranks],
        outside=[each for _, each in ranks],
        updates=updates,
        update_bytes=max(sent),
        sleeps=sleeps,
        norms=[*norms[:3], norms[-1]],
        facts=measured_with(case),
    )
    plugin.worker.shutdown("measured")
    return found


def batch_of(plugin: Plugin, case: Case) -> PackedBatch:
    layout = plugin.layout
    return packed_batch(
        case, dp_rank=layout.dp_rank, dp_size=layout.dp_size, sequence_multiple=layout.sequence_multiple
    )


def measure_head(case: Case, *, rounds: int) -> Report:
    """The kernel for log-probs alone, forward and back, by how many tokens' logits it holds at a time."""
    device, tokens = device_of(case), case.tokens
    width, vocabulary = case.fields["hidden_size"], case.fields["vocab_size"]
    generator = torch.Generator(device).manual_seed(0)
    numbers: dict[str, Any] = {"generator": generator, "device": device, "dtype": getattr(torch, case.precision)}
    hidden = torch.randn(tokens, width, **numbers).requires_grad_()
    weight = (torch.randn(vocabulary, width, **numbers) * 0.02).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator, device=device)

    def found(chunk: int | None, *, entropy: bool) -> Number:
        def both() -> None:
            hidden.grad = weight.grad = None
            logprobs, more = token_logprobs(
                hidden, weight, targets, temperature=1.0, with_entropy=entropy, chunk_tokens=chunk
            )
            (logprobs if more is None else logprobs + more).sum().backward()

        both()
        peaks: dict[str, float] = {}
        took = [timed(device, both, peaks, "peak") for _ in range(rounds)]
        rate = 6 * tokens * width * vocabulary / statistics.median(took) / 1e12
        size = "the default number of" if chunk is None else f"{chunk}"
        return Number(
            what=f"{size} tokens at a time{', with entropy' if entropy else ''}: peak {peaks.get('peak', 0) / GIB:.1f} "
            f"GiB, {rate:.0f} TFLOP/s",
            values=took,
            unit="s",
        )

    sizes = [None, *(size for size in (32, 128, 512, 1024, 2048, 4096, 8192) if size <= tokens)]
    return Report(
        name=HEAD,
        size=f"{tokens} tokens, head of {vocabulary} x {width}",
        numbers=[found(size, entropy=entropy) for size in sizes for entropy in (False, True)],
        note="Forward and backward. TFLOP/s count three multiplications, without the one that is recomputed.",
        versions=measured_with(case),
    )


# ---- the program -----------------------------------------------------------------------------------------------------


def measured_with(case: Case) -> dict[str, str]:
    return facts(case, "megatron-core", "transformer_engine")


def prepare(case: Case, *, overlap: bool) -> None:
    """The environment that a run would give this process, and its place in the group."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != case.ranks:
        sys.exit(
            f"this case takes {case.ranks} processes, and there are {ranks}: python -m torch.distributed.run "
            f"--standalone --nproc-per-node {case.ranks} -m benchmarks.megatron ..."
        )
    os.environ.update(environment("megatron", case, {**case.options, **switches(overlap=overlap)}))
    join(case)


def show(files: Sequence[Path]) -> str:
    """What several starts found, as markdown."""
    plain = [json.loads(path.read_text()) for path in files]
    reports = [_report(each["report"]) for each in plain if "report" in each]
    laid = [Laid(**each["laid"]) for each in plain if "laid" in each]
    parts, notes, found = [], [], {}
    if reports:
        parts.append(table(reports))
    if laid:
        parts.append("\n".join([LAID_HEAD, *("| " + " | ".join(each.row()) + " |" for each in laid)]))
    for report in reports:
        notes.append(f"- **{report.name}** ({report.size}). {report.note}")
        found.update(dict.fromkeys(f"{name} {value}" for name, value in report.versions.items()))
    for each in laid:
        notes.append(f"- **{each.name}**: gradient norms {', '.join(f'{norm:.5g}' for norm in each.norms)}.")
        found.update(dict.fromkeys(f"{name} {value}" for name, value in each.facts.items()))
    return "\n\n".join([", ".join(found), *parts, "\n".join(notes)]) + "\n"


def _report(plain: dict[str, Any]) -> Report:
    plain["comparisons"] = [Comparison(**each) for each in plain["comparisons"]]
    plain["numbers"] = [Number(**each) for each in plain["numbers"]]
    return Report(**plain)


def measure(name: str, *, rounds: int, overlap: bool, sleep: bool, tiny: bool) -> dict[str, Any]:
    """Called on every rank, in processes of a torchrun or in a single one."""
    case = CASES["bf16" if name == HEAD else name]
    case = case.tiny if tiny else case
    prepare(case, overlap=overlap)
    if name == HEAD:
        return {"report": asdict(measure_head(case, rounds=rounds))}
    if case.bare is not None:
        return {"report": asdict(measure_bare(case, name=name, rounds=rounds))}
    return {"laid": asdict(measure_layout(case, name, rounds, overlap, sleep))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*CASES, HEAD]
    parser.add_argument("case", nargs="?", choices=names, metavar="CASE", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=6, help="measured steps of each side (default: 6)")
    parser.add_argument("--overlap", action="store_true", help="gradients and parameters travel beside computation")
    parser.add_argument("--sleep", action="store_true", help="sleep and wake up twice at the end")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to see that everything runs")
    parser.add_argument("--output", type=Path, help="a JSON file for what was found; without it a table is printed")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="only print what these files hold")
    args = parser.parse_args()
    if args.table:
        print(show(args.table))
        return
    if not args.case:
        parser.error(f"which case? {', '.join(names)}")
    found = measure(args.case, rounds=args.rounds, overlap=args.overlap, sleep=args.sleep, tiny=args.tiny)
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as scratch:
            file = args.output or Path(scratch) / "found.json"
            file.write_text(json.dumps(found))
            text = show([file])
        print(text, flush=True)
        if DIFFERENT in text:
            sys.exit(DIFFERENT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
