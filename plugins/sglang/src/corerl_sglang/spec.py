"""The lightweight spec that CoreRL reads before any process exists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from corerl.config import ALL_LINEAR, ClusterInfo
from corerl.models import experts_of
from corerl.plugin import EngineSpec, Environment, Problem
from corerl_sglang import fp8
from corerl_sglang.arguments import adapter_misfits, contradictions
from corerl_sglang.config import CALLS, SglangConfig
from corerl_sglang.probe import probe

# Attention backends that SGLang 0.5.15 and 0.5.17 declare batch-invariant.
DETERMINISTIC_ATTENTION = ("fa3", "flashinfer", "triton", "fa4", "ascend")

WITHOUT_ADAPTERS = ("mistral3",)  # model types whose class has no LoRA in SGLang 0.5.17: the server ends as it starts


def environment(config: SglangConfig, cluster: ClusterInfo) -> Environment:
    return {
        # Otherwise log-probs would be of the logits before temperature.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",
        # The server's context exceeds the model's own by the positions that SGLang reserves, or as the user asks.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }


def bundles(config: SglangConfig, cluster: ClusterInfo) -> int:
    return config.tensor_parallel


def calls(config: SglangConfig, cluster: ClusterInfo) -> int:
    return CALLS


def check(config: SglangConfig, cluster: ClusterInfo) -> Iterable[Problem]:
    tp = config.tensor_parallel
    for setting in ("data_parallel", "expert_parallel"):
        if tp % (parts := getattr(config, setting)):
            yield Problem(setting, f"{parts} does not divide tensor_parallel={tp}; use a divisor of {tp}")
    if config.deterministic and config.attention_backend not in ("", *DETERMINISTIC_ATTENTION):
        yield Problem(
            "attention_backend",
            f"{config.attention_backend!r} depends on the batch, but deterministic=true needs one that does not; use "
            f"one of {', '.join(DETERMINISTIC_ATTENTION)}",
        )
    apart = cluster.lora is not None and cluster.weights is not None and cluster.weights.lora == "adapter"
    if apart and config.data_parallel > 1:
        yield Problem(
            "data_parallel",
            f"{config.data_parallel}, but with weights.lora='adapter' the server has one attention for all ranks; set "
            "it to 1, or weights.lora to 'merged'",
        )
    if apart and cluster.lora is not None and ALL_LINEAR not in (named := cluster.lora.targets or (ALL_LINEAR,)):
        for text in adapter_misfits([name.rpartition(".")[2] for name in named]):
            yield Problem(".weights.lora", text)
    if apart and (kind := cluster.model.get("model_type")) in WITHOUT_ADAPTERS:
        yield Problem(
            ".weights.lora",
            f"'adapter', with which SGLang 0.5.17 does not start for models of type {kind!r}; set it to 'merged'",
        )
    for name, text in contradictions(config.server):
        yield Problem(f"server.{name}", text)
    if cluster.model:
        yield from misfits(config, cluster.model)
    if cluster.weights is not None and cluster.weights.quantize == "fp8":
        yield from fp8.problems(config, cluster)


def misfits(config: SglangConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of dividing the model as configured."""
    model = {**model, **(model.get("text_config") or {})}  # of one that reads pictures
    experts = max(1, experts_of(model))
    if experts == 1 and config.expert_parallel > 1:
        yield Problem("expert_parallel", f"{config.expert_parallel}, but the model has no experts; set it to 1")
    elif experts % config.expert_parallel:
        yield Problem(
            "expert_parallel",
            f"{config.expert_parallel} does not divide the model's {experts} experts; use a divisor",
        )
    if experts == 1 and config.routed_experts:
        yield Problem("routed_experts", "true, but the model has no experts; set it to false")
    if config.tensor_parallel % config.data_parallel:
        return
    parts = config.tensor_parallel // config.data_parallel  # that one attention is split over
    heads: int = model.get("num_attention_heads") or 0
    if heads and heads % parts:
        yield Problem("tensor_parallel", f"{parts} does not divide the model's {heads} attention heads; use a divisor")
    kv: int = model.get("num_key_value_heads") or heads
    if heads and not heads % parts and kv % parts and parts % kv:
        yield Problem(
            "tensor_parallel",
            f"{parts} neither divides the model's {kv} key-value heads nor is a multiple of them; use a divisor",
        )


SPEC = EngineSpec(
    implementation="corerl_sglang.start:start_engine",
    config=SglangConfig,
    api=(2, 0),
    summary="SGLang: one server a replica, over one device or several, each taking its weights from the trainer",
    environment=environment,
    bundles=bundles,
    calls=calls,
    check=check,
    probe=probe,
    quantized=("none", "fp8"),  # the server is started for the form in which weights arrive
    adapters=True,
    pictures=True,
    cache_use=True,
)
