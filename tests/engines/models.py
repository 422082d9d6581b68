"""Small models with random weights, and their delivery to engines through files, as a trainer on this machine would."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from corerl.config.schema import LoraConfig, ModelConfig
from corerl.engines.base import Engine, EngineContext, GenerateRequest, Generation, Received
from corerl.engines.lifecycle import EngineLifecycle
from corerl.models.config import hf_config
from corerl.models.files import meta_model
from corerl.models.names import shapes_of
from corerl.plugin.transports import open_sender
from corerl.weights.adapters import adapters_of, is_adapter
from corerl.weights.manifest import build_manifest
from corerl.weights.transport import Address

VOCAB = 16
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,  # wide enough that some tokens are much likelier than others
}
TIED = {"model_type": "qwen3", "tie_word_embeddings": True, **SMALL}
UNTIED = {"model_type": "llama", "tie_word_embeddings": False, **SMALL}
MOE = {
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    **SMALL,
}


def context(index: int = 0) -> EngineContext:
    return EngineContext(name=f"engine-{index}", index=index, device="cpu", precision="float32")


def spread(engines: Sequence[Engine], request: GenerateRequest) -> Generation:
    """The rows of a request, drawn by several engines."""
    parts = request.parts(len(engines))
    return Generation.concatenate([engine.generate(part) for engine, part in zip(engines, parts, strict=False)])


def random_model(fields: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """A plain transformers model, initialized and run by transformers alone."""
    torch.manual_seed(seed)
    config = hf_config(ModelConfig(config=fields))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


def hf_tensors(model: PreTrainedModel, directory: Path) -> dict[str, torch.Tensor]:
    """What transformers writes for this model, by the names in its files."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def drawn_adapters(
    config: ModelConfig, lora: LoraConfig, weights: Mapping[str, torch.Tensor], *, scale: float, seed: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Random adapters of a model, and the weights that they come to."""
    shapes = shapes_of(meta_model(hf_config(config), lora=lora))
    generator = torch.Generator().manual_seed(seed)
    made = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items() if is_adapter(name)}
    merged = dict(weights)
    for name, weight in weights.items():
        a, b = adapters_of(name)
        if a in made:
            merged[name] = weight + scale * made[b] @ made[a]
    return made, merged


def update(
    engines: Sequence[Engine], tensors: Mapping[str, torch.Tensor], *, version: int, path: Path, ranks: int = 1
) -> list[Received]:
    """Send `tensors` in buckets of at most 8 KiB to all engines at once, each of so many `ranks`."""
    names = tuple(f"engine-{index}" for index in range(len(engines)) for _ in range(ranks))
    # A token of its own, as each run has: what an earlier update of the same version left there is not this one's.
    address = Address(transport="disk", engines=names, path=str(path), timeout=20.0, token=uuid.uuid4().hex)
    shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    (dtype,) = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    manifest = build_manifest(shapes, dtype=dtype, bucket_bytes=8192)
    results: list[Received | None] = [None] * len(engines)

    def receive(index: int) -> None:
        results[index] = engines[index].receive(manifest, version, address)

    threads = [threading.Thread(target=receive, args=(index,)) for index in range(len(engines))]
    for thread in threads:
        thread.start()
    sender = open_sender(address)
    sender.open(manifest, version)
    for bucket in manifest.buckets:
        sender.send(bucket, torch.cat([tensors[entry.name].flatten() for entry in bucket.entries]))
    sender.finish()
    for thread in threads:
        thread.join()
    return [result for result in results if result is not None]


def pause_after(monkeypatch: pytest.MonkeyPatch, asked: int) -> None:
    """Have engines find themselves paused once they have asked that often: before a run of rows, before a token."""
    times = itertools.count()
    monkeypatch.setattr(EngineLifecycle, "paused", property(lambda serving: next(times) >= asked))


def plain_logprobs(model: PreTrainedModel, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """[L - 1, V] of one sequence without padding: entry t is the distribution of token t + 1."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def sequences(request: GenerateRequest, generation: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, response, log-probs) of each row."""
    rows = []
    for row in range(len(request)):
        prompt = request.tokens[request.offsets[row] : request.offsets[row + 1]]
        low, high = generation.offsets[row : row + 2]
        rows.append((prompt.tolist(), generation.tokens[low:high].tolist(), generation.logprobs[low:high].tolist()))
    return rows
