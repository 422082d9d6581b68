"""The spec, which CoreRL reads before any worker exists."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from corerl.config import ClusterInfo
from corerl.models import experts_of
from corerl.plugin import FULL, BackendSpec, Capability, Environment, Problem, Variant, not_implemented, unsupported
from corerl_megatron.config import MegatronConfig, too_precise
from corerl_megatron.families import (
    BRIDGE_INSTALL,
    FAMILIES,
    NO_SOFTMAX,
    UNSPLIT,
    architecture,
    unsupported_by,
)
from corerl_megatron.memory import memory
from corerl_megatron.probe import probe
from corerl_megatron.slow import slow


def model_ranks(config: MegatronConfig) -> int:
    """The number of ranks over which one copy of the dense model, and each sequence, is split."""
    return config.tensor_parallel * config.pipeline_parallel * config.context_parallel


def expert_ranks(config: MegatronConfig) -> int:
    """The number of ranks over which one copy of the experts is split."""
    tensor = config.expert_tensor_parallel or config.tensor_parallel
    return tensor * config.expert_parallel * config.pipeline_parallel


def data_parallel(config: MegatronConfig, cluster: ClusterInfo) -> int:
    return cluster.ranks // model_ranks(config)


def environment(config: MegatronConfig, cluster: ClusterInfo) -> Environment:
    if cluster.device != "cuda":
        return {}
    # TransformerEngine multiplies float32 matrices in TF32, 10 bits of 23, regardless of torch's settings, and
    # megatron-core's routers use it whenever it is installed.
    found = {"NVIDIA_TF32_OVERRIDE": "0"}
    if config.tensor_parallel > 1 or config.context_parallel > 1:
        # With one queue to the device, kernels start in the order of submission: communication starts first, and so
        # overlaps with the multiplication that follows.
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if not config.nvls:
        found["NCCL_NVLS_ENABLE"] = "0"
    return found


def check(config: MegatronConfig, cluster: ClusterInfo) -> Iterable[Problem]:
    yield from _layout(config, cluster)
    yield from _switches(config, cluster)
    if cluster.lora is not None:
        yield from _beside_adapters(config)
    recompute = cluster.train is not None and cluster.train.recompute == "full"
    if config.bridge:
        yield from _bridge(config, cluster, recompute=recompute)
    elif cluster.model:
        yield from _model(config, cluster.model, recompute=recompute)
        coef = cluster.train.aux_loss_coef if cluster.train is not None else 0.0
        if coef and not unsupported_by(cluster.model) and architecture(cluster.model, value_head=False).choice_bias:
            yield Problem(".train.aux_loss_coef", f"{coef:g}, but {NO_SOFTMAX.format(cluster.model['model_type'])}")


def _beside_adapters(config: MegatronConfig) -> Iterator[Problem]:
    """The options that low-rank adapters cannot be trained with."""
    if config.bridge:
        yield Problem(
            "bridge",
            "true, but low-rank adapters ([lora]) are only put beside the layers of this backend's own families; set "
            "it to false, or train all weights",
        )
    if config.fp8 != "none":
        yield Problem(
            "fp8",
            f"{config.fp8!r}, but low-rank adapters ([lora]) have not been tried beside products in 8 bits; set it to "
            "'none'",
        )
    if config.native_checkpoint:
        yield Problem(
            "native_checkpoint",
            "true, but megatron-core's own checkpoint has no place for low-rank adapters ([lora]); set it to false",
        )


def _layout(config: MegatronConfig, cluster: ClusterInfo) -> Iterator[Problem]:
    tp, pp, cp = config.tensor_parallel, config.pipeline_parallel, config.context_parallel
    ranks = cluster.ranks
    if ranks % model_ranks(config):
        yield Problem(
            "tensor_parallel",
            f"{tp}, with pipeline_parallel={pp} and context_parallel={cp}, needs {tp * pp * cp} ranks for one copy of "
            f"the model, which does not divide the role's {ranks} ranks; change one of them",
        )
    if (config.expert_parallel > 1 or experts_of(cluster.model)) and ranks % expert_ranks(config):
        etp = config.expert_tensor_parallel or tp
        yield Problem(
            "expert_parallel",
            f"{config.expert_parallel}, with expert_tensor_parallel={etp} and pipeline_parallel={pp}, needs "
            f"{expert_ranks(config)} ranks for one copy of the experts, which does not divide the role's {ranks} "
            "ranks; change one of them",
        )
    if config.virtual_pipeline > 1 and pp == 1:
        yield Problem(
            "virtual_pipeline",
            f"{config.virtual_pipeline}, but there is only one stage to interleave; set pipeline_parallel to 2 or "
            "more, or virtual_pipeline to 1",
        )


def _switches(config: MegatronConfig, cluster: ClusterInfo) -> Iterator[Problem]:
    if config.sequence_parallel and config.tensor_parallel == 1:
        yield Problem("sequence_parallel", "true, but tensor_parallel is 1; raise tensor_parallel, or remove this")
    if config.overlap_param_gather and not (config.distributed_optimizer and config.overlap_grad_reduce):
        yield Problem(
            "overlap_param_gather", "true, which needs distributed_optimizer and overlap_grad_reduce; set both to true"
        )
    wants_engine = {
        "transformer": config.transformer == "transformer_engine",
        "fp8": config.fp8 != "none",
    }
    for name, wanted in wants_engine.items():
        if wanted and cluster.device != "cuda":
            yield Problem(
                name,
                f"{getattr(config, name)!r} needs TransformerEngine, which needs a GPU, but the device is "
                f"{cluster.device}; remove it",
            )
        elif wanted and cluster.train is not None and too_precise(config, cluster.train.precision):
            yield Problem(
                name,
                f"{getattr(config, name)!r}, but TransformerEngine has no attention for context_parallel="
                f"{config.context_parallel} in float32; set train.precision='bfloat16', or remove it",
            )
    if config.fp8 != "none" and config.transformer == "torch":
        yield Problem("fp8", f"{config.fp8!r} needs TransformerEngine, but transformer is 'torch'; set that to 'auto'")


def _bridge(config: MegatronConfig, cluster: ClusterInfo, *, recompute: bool) -> Iterator[Problem]:
    """What can be checked without importing Megatron-Bridge, which takes seconds; ranks check the rest."""
    if not all(importlib.util.find_spec(name) for name in ("megatron", "megatron.bridge")):
        yield Problem("bridge", f"true, but megatron-bridge is not installed; {BRIDGE_INSTALL}")
    if cluster.device != "cuda" or config.transformer == "torch":
        found = f"the device is {cluster.device}" if cluster.device != "cuda" else "transformer is 'torch'"
        yield Problem(
            "bridge",
            f"true, but {found}, and its models are made of TransformerEngine's layers; remove it, or use a GPU with "
            "transformer='auto'",
        )
    if config.fp8 != "none":
        yield Problem("bridge", f"true with fp8={config.fp8!r}, which has not been tried; set fp8='none'")
    if cluster.train is not None and too_precise(config, cluster.train.precision):
        yield Problem(
            "bridge",
            f"true, but TransformerEngine has no attention for context_parallel={config.context_parallel} in float32; "
            "set train.precision='bfloat16', or context_parallel to 1",
        )
    model = cluster.model
    if not model:
        return
    tp, stages, experts = config.tensor_parallel, config.pipeline_parallel * config.virtual_pipeline, experts_of(model)
    counts = {name: value for name, value in model.items() if isinstance(value, int)}
    if tp > 1 and (reason := UNSPLIT.get(str(model.get("model_type")))):
        yield Problem("tensor_parallel", f"{tp}, but {reason}; set it to 1")
    yield from _divided(
        config,
        ("tensor_parallel", tp, counts.get("num_attention_heads", 0), "attention heads"),
        ("tensor_parallel", tp, counts.get("num_key_value_heads", 0), "key-value heads"),
        ("pipeline_parallel", stages, counts.get("num_hidden_layers", 0), "layers"),
        ("expert_parallel", config.expert_parallel, experts, "experts"),
    )
    if recompute:
        yield from _recomputed(config, counts.get("num_hidden_layers", 0) // stages)
    yield from _experts(config, experts=experts, latent=False)


def _model(config: MegatronConfig, model: Mapping[str, Any], *, recompute: bool) -> Iterator[Problem]:
    if reason := unsupported_by(model):
        yield Problem(".model", reason)
        return
    built = architecture(model, value_head=False)
    sizes, experts = built.transformer, built.experts
    tp, stages = config.tensor_parallel, config.pipeline_parallel * config.virtual_pipeline
    expert_tp = config.expert_tensor_parallel or tp
    splits_experts = "expert_tensor_parallel" if config.expert_tensor_parallel else "tensor_parallel"
    divided = (
        ("tensor_parallel", tp, sizes["num_attention_heads"], "attention heads"),
        ("tensor_parallel", tp, sizes["num_query_groups"], "key-value heads"),
        ("tensor_parallel", tp, sizes["ffn_hidden_size"] if built.dense else 0, "columns of the MLP"),
        ("tensor_parallel", tp, sizes.get("moe_shared_expert_intermediate_size", 0), "columns of the shared experts"),
        ("pipeline_parallel", stages, sizes["num_layers"], "layers"),
        ("expert_parallel", config.expert_parallel, experts, "experts"),
        (splits_experts, expert_tp, sizes.get("moe_ffn_hidden_size", 0), "columns of an expert"),
    )
    yield from _divided(config, *divided)
    if recompute:
        yield from _recomputed(config, sizes["num_layers"] // stages)
    yield from _experts(config, experts=experts, latent=built.latent)
    if experts and sizes["add_bias_linear"] and expert_tp > 1:
        yield Problem(
            "expert_tensor_parallel",
            f"{config.expert_tensor_parallel} with tensor_parallel={tp} splits experts, but megatron-core cannot split "
            f"those of a {model['model_type']} model, which have biases; set it to 1",
        )
    if config.native_checkpoint and built.alternating:
        yield Problem(
            "native_checkpoint",
            f"true, but the experts of a {model['model_type']} model keep the order of its own files here, in which "
            "columns of gate and up alternate, and no megatron-core would read them so; set it to false",
        )


def _divided(config: MegatronConfig, *divided: tuple[str, int, int, str]) -> Iterator[Problem]:
    """For each (option, parts, count, what of the model): whether so many parts are equal."""
    virtual = f" x virtual_pipeline={config.virtual_pipeline}" if config.virtual_pipeline > 1 else ""
    for name, parts, count, what in divided:
        if count % parts:
            times = virtual if name == "pipeline_parallel" else ""
            yield Problem(
                name,
                f"{getattr(config, name)}{times} does not divide the model's {count} {what}; use a divisor of {count}",
            )


def _recomputed(config: MegatronConfig, here: int) -> Iterator[Problem]:
    """Whether the layers of a stage, if it has any, are recomputed in equal parts where they have to be."""
    count = config.recompute_layers
    if (config.recompute, config.recompute_method) == ("full", "uniform") and here % count:
        yield Problem(
            "recompute_layers",
            f"{count} does not divide the {here} layers of a stage, or of an interleaved part of one; use a divisor "
            f"of {here}",
        )


def _experts(config: MegatronConfig, *, experts: int, latent: bool) -> Iterator[Problem]:
    """What experts want, and what wants experts."""
    if config.expert_parallel > 1 and not experts:
        yield Problem("expert_parallel", f"{config.expert_parallel}, but the model has no experts; set it to 1")
    if config.expert_tensor_parallel and not experts:
        yield Problem(
            "expert_tensor_parallel", f"{config.expert_tensor_parallel}, but the model has no experts; set it to 0"
        )
    tp = config.tensor_parallel
    if (experts or latent) and tp > 1 and not config.sequence_parallel:
        what = "experts" if experts else "latent attention"
        yield Problem(
            "sequence_parallel",
            f"false, but {what} with tensor_parallel={tp} can only be trained with it; set it to true",
        )


# In buckets so small that even a small model has several.
BESIDE = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket": 4096}

SPEC = BackendSpec(
    implementation="corerl_megatron.backend:MegatronBackend",
    config=MegatronConfig,
    api=(2, 2),
    summary=f"NVIDIA megatron-core: tensor, pipeline, context and expert parallelism; {len(FAMILIES)} model families",
    capabilities={
        Capability.ADAM: FULL,
        Capability.TARGETS: FULL,
        Capability.EXPERT_LORA: not_implemented("its grouped products have no place for adapters"),
        Capability.SHARED_PREFIXES: not_implemented("its attention sees packed sequences, not the paths of a tree"),
        Capability.AUX_LOSS: FULL,
        Capability.WHOLE: unsupported("megatron-core's models are code of its own, which packs sequences"),
        Capability.FLOAT16: not_implemented("no loss scale; bfloat16 has float32's range and needs none"),
    },
    environment=environment,
    data_parallel=data_parallel,
    check=check,
    memory=memory,
    slow=slow,
    probe=probe,
    variants=[
        Variant(name="whole optimizer", options={"distributed_optimizer": False}),
        Variant(name="beside computation", options=BESIDE),
        Variant(name="tensor parallel", options={"tensor_parallel": 2}),
        Variant(name="pipeline parallel", options={"pipeline_parallel": 2}),
        Variant(name="context parallel", options={"context_parallel": 2}),
        Variant(name="tensor and data parallel", options={"tensor_parallel": 2}, ranks=4),
    ],
)
