"""Asks a real SGLang, on one GPU or several, what the other tests ask the stand-in: one line for each finding.

    python -m plugins.sglang.tests.gpu_check [PIECE ...]

Wants SGLang and CoreRL installed, and the repository as the working directory. Writes gpu_check.json and the servers'
logs to $OUT, or to the working directory, after each piece. Ends with status 1 where a finding is not what it should
be. `ATTENTION` names SGLang's attention in bfloat16; in float32 it is torch's own.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM

from corerl.config import LoraConfig, ModelConfig, WeightsConfig
from corerl.engines import UNLIMITED, EngineContext, GenerateRequest, Generation, SamplingParams
from corerl.errors import EngineFailed, WorkerDied
from corerl.models import hf_boxes, hf_config, meta_model, named_weights, shapes_of
from corerl.weights import (
    SCALE,
    Address,
    WeightSender,
    adapters_of,
    bit_sums,
    build_manifest,
    converted_manifest,
    is_adapter,
    is_quantized,
)
from corerl_sglang.config import SglangConfig
from corerl_sglang.engine import SglangEngine
from corerl_sglang.start import start_engine
from corerl_testing import BLOCK, convert_bucket, open_sender, to_blocks

OUT = Path(os.environ.get("OUT", ".")).absolute()
# As SGLang sets them in its processes: both sides of a group must agree.
os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
TINY = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,  # some tokens are then much likelier than others
}
EXPERTS = {
    **TINY,
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
QWEN3_06B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
LIMITS = {"bfloat16": 0.02, "float32": 1e-3}  # of the mean absolute difference to transformers' log-probs
# The same with adapters, which SGLang applies by Triton products: TF32 of float32 values, bfloat16 between A and B.
ADAPTED = {"bfloat16": 0.03, "float32": 5e-3}  # in bfloat16 0.014 to 0.018 of many tokens, 0.027 of 16
PLAIN = WeightsConfig()
SAMPLING = {
    "greedy": SamplingParams(max_tokens=64, greedy=True),
    "sampled, temperature 0.7": SamplingParams(max_tokens=64, temperature=0.7),
    "sampled, temperature 1.3, top_p 0.8": SamplingParams(max_tokens=64, temperature=1.3, top_p=0.8),
}
QUICK = {  # what makes a server start sooner
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_prefill_cuda_graph": True,
    "cuda_graph_max_bs_decode": 32,
    "max_total_tokens": 2**17,  # of the KV cache, so that others find room on the same GPU
}


class Findings:
    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.piece = ""

    def tell(self, what: str, value: Any, good: bool = True) -> None:
        good = bool(good)
        self.found.append({"piece": self.piece, "what": what, "value": value, "good": good})
        print(f"{'ok ' if good else 'BAD'} {self.piece}: {what}: {value}", flush=True)

    def write(self) -> None:
        (OUT / "gpu_check.json").write_text(json.dumps(self.found, indent=1))


def random_model(fields: Mapping[str, Any], precision: str, seed: int) -> Any:
    torch.manual_seed(seed)
    config = hf_config(ModelConfig(config=dict(fields)))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, precision), attn_implementation="sdpa")
    return model.eval()


def hf_tensors(model: Any) -> dict[str, torch.Tensor]:
    boxes = hf_boxes(model)
    return {box.name: box.view(weight.data) for name, weight in named_weights(model).items() for box in boxes[name]}


def devices() -> tuple[str, ...]:
    """What the driver calls the GPUs that this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(visible.split(",") if visible else map(str, range(torch.cuda.device_count())))


def request(rows: int, vocabulary: int, params: SamplingParams, length: int = 32) -> GenerateRequest:
    generator = np.random.default_rng(rows)
    return GenerateRequest(
        tokens=generator.integers(3, vocabulary, rows * length),
        offsets=np.arange(rows + 1) * length,
        noise_keys=generator.integers(-(2**63), 2**63 - 1, rows),
        params=params,
    )


def logprobs(model: Any, asked: GenerateRequest, drawn: Generation) -> np.ndarray[Any, Any]:
    """Of the tokens that were drawn, end to end, by transformers."""
    divisor = 1.0 if asked.params.greedy else asked.params.temperature
    found = []
    for row in range(len(asked)):
        prompt = asked.tokens[asked.offsets[row] : asked.offsets[row + 1]]
        low, high = drawn.offsets[row : row + 2]
        tokens = torch.tensor(np.concatenate([prompt, drawn.tokens[low:high]]), device="cuda")
        with torch.inference_mode():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        plain = torch.log_softmax(logits / divisor, dim=-1).gather(1, tokens[len(prompt) :, None])[:, 0]
        found.append(plain.cpu().numpy())
    return np.concatenate(found)


def difference(model: Any, asked: GenerateRequest, drawn: Generation) -> tuple[float, float, float]:
    """Mean, median and largest absolute difference of log-probs to those of transformers for the same tokens."""
    found = np.abs(logprobs(model, asked, drawn) - drawn.logprobs)
    return float(found.mean()), float(np.median(found)), float(found.max())


@contextmanager
def engine(
    findings: Findings,
    fields: Mapping[str, Any],
    precision: str,
    *,
    ranks: int = 1,
    weights: WeightsConfig = PLAIN,
    lora: LoraConfig | None = None,
    **options: Any,
) -> Iterator[SglangEngine]:
    attention = os.environ.get("ATTENTION", "triton") if precision == "bfloat16" else "torch_native"
    server = {**QUICK, **options.pop("server", {})}
    config = SglangConfig(
        tensor_parallel=ranks, memory=0.5, attention_backend=attention, start_timeout=500.0, server=server, **options
    )
    context = EngineContext(
        name="engine-0",
        index=0,
        device="cuda",
        precision=precision,
        bundles=ranks,
        devices=devices()[:ranks] if ranks > 1 else (),
        run_dir=str(OUT / findings.piece),
        weights=weights,
        lora=lora,
    )
    started = time.perf_counter()
    served = start_engine(ModelConfig(config=dict(fields)), config, context)
    findings.tell("seconds to start", round(time.perf_counter() - started, 1))
    try:
        yield served
    finally:
        served.close()


def push(
    served: SglangEngine,
    model: Any,
    version: int,
    transport: str,
    *,
    ranks: int = 1,
    weights: WeightsConfig = PLAIN,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> tuple[str, float]:
    """What went wrong, or "", and the seconds that one update took from beginning to end. By ipc each device has a
    sender, in a thread of its own, as each has a rank in a run."""
    names = tuple(f"engine-0 rank {rank}" for rank in range(ranks))
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    address = Address(
        transport=transport,
        engines=names,
        host="127.0.0.1",
        port=listening.getsockname()[1],
        listen_fd=listening.detach(),
        path=str(OUT / "weights"),
        token=uuid.uuid4().hex,
        colocated_ranks=tuple(range(ranks)) if transport == "ipc" else (),
        device="cuda" if transport == "ipc" else "cpu",  # of the buffers
        timeout=120.0,
    )
    tensors = hf_tensors(model) if tensors is None else tensors
    shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    (dtype,) = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    manifest = build_manifest(shapes, dtype=dtype, bucket_bytes=256 * 2**20)
    stream = converted_manifest(manifest, weights.unquantized) if weights.quantize == "fp8" else manifest
    started = time.perf_counter()
    errors: list[str] = []
    receiving = threading.Thread(target=lambda: errors.append(served.receive(stream, version, address).error))
    receiving.start()
    told: dict[str, str] = {}

    def send(rank: int) -> WeightSender:
        torch.cuda.set_device(rank)
        sender = open_sender(address, rank=rank)
        sender.open(stream, version)
        for bucket, as_sent in zip(manifest.buckets, stream.buckets, strict=True):
            flat = torch.cat([tensors[entry.name].flatten() for entry in bucket.entries])
            if stream is not manifest:
                plain, flat = flat, torch.empty(as_sent.numel, dtype=torch.uint8, device=flat.device)
                convert_bucket(bucket, plain, as_sent, flat)
            sender.send(as_sent, flat.cuda() if transport == "ipc" else flat)
        told.update(sender.finish())
        return sender

    with ThreadPoolExecutor(ranks) as threads:
        senders = list(threads.map(send, range(ranks if transport == "ipc" else 1)))
    receiving.join()
    for sender in senders:  # not before: over a disk, engines only begin to read now
        sender.close()
    return errors[0] or next(filter(None, told.values()), ""), time.perf_counter() - started


def compare(
    findings: Findings,
    served: SglangEngine,
    model: Any,
    version: int,
    *,
    routed: bool = False,
) -> None:
    """With `routed` the median alone has a limit: where routers of low precision choose other experts, a token's
    log-prob is another, and so are those after it."""
    limit = LIMITS[str(model.dtype).removeprefix("torch.")]
    for name, params in SAMPLING.items():
        asked = request(16, model.config.vocab_size, params)
        drawn = served.generate(asked)
        mean, median, largest = difference(model, asked, drawn)
        findings.tell(f"{name}: |log-prob difference|, mean", mean, routed or mean < limit)
        findings.tell(f"{name}: |log-prob difference|, median", median, median < limit)
        findings.tell(f"{name}: |log-prob difference|, largest", largest)
        findings.tell(f"{name}: versions", sorted(set(drawn.versions.tolist())), set(drawn.versions) == {version})


def told_sums(findings: Findings, served: SglangEngine, tensors: Mapping[str, torch.Tensor]) -> None:
    """What the ranks say that they hold, beside what was sent."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    sent = bit_sums(tensors)
    started = time.perf_counter()
    sums = served.weight_sums(dtypes.pop() if len(dtypes) == 1 else "uint8") or {}
    findings.tell("seconds to tell what is held", round(time.perf_counter() - started, 3))
    untold = sorted(sent.keys() - sums.keys())
    findings.tell(f"tensors of {len(sent)} that are not told", untold[:5], not untold)
    wrong = sorted(name for name in sums if sums[name] != sent[name])
    findings.tell("tensors whose bits are others than were sent", wrong[:5], not wrong)


def updated(
    findings: Findings,
    served: SglangEngine,
    model: Any,
    version: int,
    transport: str,
    *,
    ranks: int = 1,
    routed: bool = False,
) -> bool:
    """Whether the engine has taken an update; if it has, its log-probs and what its ranks hold are looked at."""
    error, seconds = push(served, model, version, transport, ranks=ranks)
    findings.tell(f"update by {transport}, seconds", round(seconds, 3), not error)
    if error:
        findings.tell(f"update by {transport}", error, good=False)
        return False
    compare(findings, served, model, version, routed=routed)
    told_sums(findings, served, hf_tensors(model))
    return True


def free() -> float:
    """GiB of the first device, whoever uses the rest."""
    return round(torch.cuda.mem_get_info(0)[0] / 2**30, 2)


def small(findings: Findings, precision: str) -> None:
    """Weights through disk and collective, log-probs, a refused version, stop tokens, sleep and wake."""
    first, second = (random_model(TINY, precision, seed) for seed in (1, 2))
    with engine(findings, TINY, precision) as served:
        for version, (model, transport) in enumerate([(first, "disk"), (second, "collective"), (first, "collective")]):
            updated(findings, served, model, version, transport)
        error, _ = push(served, second, 2, "disk")
        findings.tell("an old version is refused", error, "is not newer than 2" in error)
        asked = request(8, 512, SamplingParams(max_tokens=64, greedy=True))
        whole = served.generate(asked)
        stop = int(whole.tokens[5])
        cut = served.generate(request(8, 512, SamplingParams(max_tokens=64, greedy=True, stop_tokens=(stop,))))
        ends = cut.tokens[cut.offsets[1:] - 1]
        findings.tell("the first sample ends with the stop token", ends.tolist(), ends[0] == stop)
        findings.tell("truncated without it", cut.truncated.tolist(), bool((cut.truncated == (ends != stop)).all()))
        before = free()
        freed = served.sleep()
        asleep = free()
        findings.tell("GiB that sleep says", round(freed / 2**30, 2))
        findings.tell("GiB free on the device, before and asleep", [before, asleep], asleep > before)
        served.wake_up()
        findings.tell("GiB free when only the weights are awake", free())
        updated(findings, served, second, 3, "collective")
        findings.tell("GiB free when it has generated again", free(), free() <= asleep)
        os.kill(served._server.pid, signal.SIGKILL)
        try:
            served.generate(asked)
            findings.tell("a killed server", "answered", good=False)
        except WorkerDied as died:
            findings.tell("a killed server is a dead replica", died.message.splitlines()[0][:200])
    time.sleep(3.0)  # the driver gives memory back when it has cleared it
    findings.tell("GiB free when all is gone", free(), free() >= asleep - 0.5)


def by_handle(findings: Findings) -> None:
    """CUDA IPC from this process, which shares the device: updates before and after a sleep, and that neither side
    keeps what was handed over. Run again with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it must say the same."""
    model = random_model(QWEN3_06B, "bfloat16", 1)
    held: list[tuple[int, float]] = []  # bytes of this process, GiB that are free
    with engine(findings, QWEN3_06B, "bfloat16") as served:
        for version in range(4):
            if version == 2:
                served.sleep()
                served.wake_up()
            if not updated(findings, served, model, version, "ipc"):
                return
            torch.cuda.empty_cache()
            held.append((torch.cuda.memory_allocated(), free()))
        # After the first update there may be more to come: handles of libraries, kernels that are loaded.
        findings.tell("bytes that this process holds after each", [each for each, _ in held], held[3][0] == held[1][0])
        findings.tell("GiB free after each", [each for _, each in held], held[3][1] > held[1][1] - 0.2)


def repeated(findings: Findings) -> None:
    """With `deterministic` a row's draw depends neither on the others nor on when it is asked."""
    model = random_model(TINY, "bfloat16", 1)
    with engine(findings, TINY, "bfloat16", deterministic=True) as served:
        updated(findings, served, model, 0, "disk")
        asked = request(16, 512, SamplingParams(max_tokens=64, temperature=0.9, top_p=0.95))
        first, again, alone = served.generate(asked), served.generate(asked), served.generate(asked.row_range(5, 6))
        findings.tell("drawn twice", "equal", bool(np.array_equal(first.tokens, again.tokens)))
        row = first.tokens[first.offsets[5] : first.offsets[6]]
        findings.tell("drawn alone", "equal", bool(np.array_equal(row, alone.tokens)))


def experts(findings: Findings) -> None:
    """A model of experts tells which; the share that transformers' routers choose too."""
    model = random_model(EXPERTS, "bfloat16", 1)
    with engine(findings, EXPERTS, "bfloat16", routed_experts=True) as served:
        updated(findings, served, model, 0, "collective", routed=True)
        asked = request(4, 512, SamplingParams(max_tokens=16, greedy=True, routed_experts=True))
        drawn = served.generate(asked)
        assert drawn.routed_experts is not None
        chosen: list[torch.Tensor] = []
        handles = [
            module.register_forward_hook(
                lambda _m, _a, out: chosen.append(next(each for each in out if not each.is_floating_point()))
            )
            for name, module in model.named_modules()
            if name.endswith("mlp.gate")
        ]
        prompt, low, high = asked.tokens[:32], *drawn.offsets[:2]
        with torch.inference_mode():
            model(input_ids=torch.tensor(np.concatenate([prompt, drawn.tokens[low:high]]), device="cuda")[None])
        for handle in handles:
            handle.remove()
        wanted = torch.stack(chosen, dim=1).cpu().numpy()  # [T, layers, k]
        told = drawn.routed_experts[: len(wanted)]
        same = float((np.sort(told[:-1]) == np.sort(wanted[:-1])).all(axis=-1).mean())
        findings.tell("shape", list(drawn.routed_experts.shape), told.shape == wanted.shape)
        findings.tell("share of equal choices", same, same > 0.9)
        findings.tell("of the last token", told[-1].tolist(), bool((told[-1] == -1).all()))


def in_blocks(model: Any, weights: WeightsConfig) -> dict[str, torch.Tensor]:
    """The model's tensors as they are sent, which here are quantized one by one."""
    sent: dict[str, torch.Tensor] = {}
    for name, tensor in hf_tensors(model).items():
        if not is_quantized(name, tuple(tensor.shape), weights.unquantized):
            sent[name] = tensor
            continue
        blocks = [-(-size // BLOCK) for size in tensor.shape]
        sent[name] = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn, device=tensor.device)
        sent[name + SCALE] = torch.empty(blocks, dtype=torch.float32, device=tensor.device)
        to_blocks(tensor, sent[name], sent[name + SCALE])
    return sent


def put_together(model: Any, sent: Mapping[str, torch.Tensor]) -> Any:
    """A model of the weights that an engine has when it is sent these."""
    copied = copy.deepcopy(model)
    for name, tensor in hf_tensors(copied).items():
        if name + SCALE in sent:
            spread = sent[name + SCALE].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            tensor.copy_(sent[name].float() * spread[: tensor.shape[0], : tensor.shape[1]])
    return copied


@contextmanager
def activations_in_fp8(model: Any, sent: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """What goes into the linear layers that are quantized is rounded as SGLang's kernels round it: each token's, in
    groups of 128 columns. Of experts that is what goes into them, and nothing inside."""

    def rounded(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        groups = args[0].float().unflatten(-1, (-1, BLOCK))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / torch.finfo(torch.float8_e4m3fn).max
        return (((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(args[0].dtype), *args[1:])

    handles = [
        module.register_forward_pre_hook(rounded)
        for name, module in model.named_modules()
        if f"{name}.weight{SCALE}" in sent or name.endswith(".experts")
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fp8(findings: Findings, fields: Mapping[str, Any], kernels: str) -> None:
    """Weights in blocks of FP8, other ones with each update, by broadcast and by handle, before and after a sleep.

    Beside them stands transformers in bfloat16 with the weights that the blocks say. SGLang quantizes what goes into
    linear layers too. How much that changes is measured in transformers, and SGLang's log-probs may be half as far
    again: not token by token, since the least difference rounds to other numbers of FP8, but on average.
    """
    weights = WeightsConfig(quantize="fp8")
    models = [random_model(fields, "bfloat16", seed) for seed in (1, 2)]
    server = {"fp8_gemm_runner_backend": kernels}
    with engine(findings, fields, "bfloat16", weights=weights, server=server) as served:
        findings.tell("GiB of weights", round(served._bytes["weights"] / 2**30, 3))
        for version, transport in enumerate(["collective", "collective", "ipc", "ipc"]):
            model = models[version % 2]
            if version == 3:
                served.sleep()
                served.wake_up()
            error, seconds = push(served, model, version, transport, weights=weights)
            findings.tell(f"update by {transport}, seconds", round(seconds, 3), not error)
            if error:
                findings.tell(f"update by {transport}", error, good=False)
                return
            sent = in_blocks(model, weights)
            told_sums(findings, served, sent)
            compare_fp8(findings, served, put_together(model, sent), sent, version)
        error, _ = push(served, models[0], 4, "disk")
        findings.tell("weights that are not quantized are refused", error, "the trainer does not send" in error)


def compare_fp8(
    findings: Findings, served: SglangEngine, reference: Any, sent: Mapping[str, torch.Tensor], version: int
) -> None:
    for name, params in SAMPLING.items():
        asked = request(16, reference.config.vocab_size, params)
        drawn = served.generate(asked)
        findings.tell(f"{name}: versions", sorted(set(drawn.versions.tolist())), set(drawn.versions) == {version})
        plain = logprobs(reference, asked, drawn)
        found = np.abs(plain - drawn.logprobs)
        with activations_in_fp8(reference, sent):
            caused = float(np.abs(plain - logprobs(reference, asked, drawn)).mean())
        findings.tell(f"{name}: |log-prob difference| that activations in FP8 make in transformers, mean", caused)
        mean = float(found.mean())
        findings.tell(f"{name}: |log-prob difference|, mean", mean, mean < 1.5 * caused)
        findings.tell(f"{name}: |log-prob difference|, largest", float(found.max()))


def two_ranks(findings: Findings) -> None:
    """One replica over two devices, each of its ranks with a receiver."""
    model = random_model(TINY, "bfloat16", 1)
    with engine(findings, TINY, "bfloat16", ranks=2) as served:
        for version, transport in enumerate(["disk", "collective", "ipc"]):
            if not updated(findings, served, model, version, transport, ranks=2):
                return


def versions(findings: Findings, precision: str) -> None:
    """Several versions of adapters at once, each as if it were alone, also in one batch; and scores of prompts."""
    lora, most = LoraConfig(rank=8).settled({}), 3
    base = random_model(TINY, precision, 1)
    shapes = shapes_of(meta_model(base.config, lora=lora))
    models: dict[int, Any] = {}
    first: dict[int, Generation] = {}
    asked = request(16, 512, SAMPLING["greedy"])
    with engine(findings, TINY, precision, weights=WeightsConfig(lora="adapter", versions=most), lora=lora) as served:

        def alike(version: int, drawn: Generation, what: str) -> None:
            mean, _, largest = difference(models[version], asked, drawn)
            findings.tell(f"{what}: |log-prob difference|, mean", mean, mean < ADAPTED[precision])
            findings.tell(f"{what}: |log-prob difference|, largest", largest)
            findings.tell(f"{what}: versions", sorted(set(drawn.versions.tolist())), set(drawn.versions) == {version})
            if (before := first.setdefault(version, drawn)) is not drawn:
                same = before.tokens.tolist() == drawn.tokens.tolist()
                findings.tell(f"{what}: tokens as before", same)  # which two slots of a batch may round apart
                if same:
                    off = float(np.abs(before.logprobs - drawn.logprobs).max())
                    findings.tell(f"{what}: log-probs as before, largest difference", off)

        for version in range(5):
            torch.manual_seed(version)
            made = {
                name: (0.1 * torch.randn(shape)).to(base.device, base.dtype)
                for name, shape in shapes.items()
                if is_adapter(name)
            }
            model = models[version] = copy.deepcopy(base)
            for name, weight in hf_tensors(model).items():
                a, b = (made.get(each) for each in adapters_of(name))
                if a is not None and b is not None:
                    weight += (lora.scale * b.float() @ a.float()).to(weight)
            whole = hf_tensors(base) if version == 0 else {}
            error, seconds = push(served, base, version, "disk", tensors={**whole, **made})
            findings.tell(f"update {version}, seconds", round(seconds, 3), not error)
            held = range(max(0, version + 1 - most), version + 1)
            for each in held:
                alike(each, served.generate(evolve(asked, version=each)), f"version {each} of {list(held)}")
        with ThreadPoolExecutor(most) as threads:  # in the same batches
            together = {each: threads.submit(served.generate, evolve(asked, version=each)) for each in held}
        for each, work in together.items():
            alike(each, work.result(), f"version {each} together with others")
        try:
            served.generate(evolve(asked, version=1))
            findings.tell("a version that is gone", "answered", good=False)
        except EngineFailed as refused:
            findings.tell("a version that is gone", refused.message)
        for last, top in ((UNLIMITED, 5), (3, 2), (1, 0)):
            scores = served.generate(
                evolve(asked, version=3, params=SamplingParams(max_tokens=1, scored=last, scored_top=top))
            ).scores
            assert scores is not None
            of_tokens, likeliest = [], []  # differences; of all rows together, since single ones are of a few tokens
            for row, tokens in enumerate(asked.by_row()):
                count = min(last, len(tokens) - 1)
                with torch.inference_mode():
                    logits = models[3](input_ids=torch.tensor(tokens, device="cuda")[None], use_cache=False).logits[0]
                wanted = logits[-count - 1 : -1].double().log_softmax(-1).cpu()
                own = scores.part(asked.offsets[row + 1] - count, asked.offsets[row + 1])
                chosen = wanted.gather(1, torch.tensor(tokens[-count:])[:, None])[:, 0].numpy()
                of_tokens.append(np.abs(own.logprobs - chosen))
                likeliest.append(np.abs(own.top_logprobs - wanted.topk(top).values.numpy()).ravel())
            for what, off in ((f"scores of the last {last}", of_tokens), (f"likeliest {top}", likeliest)):
                if (differences := np.concatenate(off)).size:
                    mean = float(differences.mean())
                    findings.tell(f"{what}: mean difference of {len(differences)}", mean, mean < ADAPTED[precision])


PIECES: dict[str, tuple[int, Callable[[Findings], None]]] = {  # devices that each wants
    "small-bfloat16": (1, lambda findings: small(findings, "bfloat16")),
    "small-float32": (1, lambda findings: small(findings, "float32")),
    "versions-float32": (1, lambda findings: versions(findings, "float32")),
    "versions-bfloat16": (1, lambda findings: versions(findings, "bfloat16")),
    "ipc": (1, by_handle),
    "repeated": (1, repeated),
    "experts": (1, experts),
    # Triton's kernels start at once; DeepGEMM's, which are SGLang's own choice on Hopper, are compiled for minutes.
    "fp8": (1, lambda findings: fp8(findings, QWEN3_06B, "triton")),
    "fp8-experts": (1, lambda findings: fp8(findings, EXPERTS, "triton")),
    "fp8-auto": (1, lambda findings: fp8(findings, QWEN3_06B, "auto")),
    "two-ranks": (2, two_ranks),
}


def main() -> int:
    findings = Findings()
    for name in sys.argv[1:] or PIECES:
        devices, piece = PIECES[name]
        findings.piece = name
        if torch.cuda.device_count() < devices:
            findings.tell("left out: devices here, and wanted", [torch.cuda.device_count(), devices])
            continue
        try:
            piece(findings)
        except Exception as error:  # the other pieces still have something to say
            traceback.print_exc()
            findings.tell("failed", f"{type(error).__name__}: {error}", good=False)
        findings.write()
    return int(not all(each["good"] for each in findings.found))


if __name__ == "__main__":
    sys.exit(main())
