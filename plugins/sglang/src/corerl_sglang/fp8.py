"""Check and configure SGLang for weights that arrive in FP8 (`weights.quantize = "fp8"`).

SGLang serves them like published FP8 checkpoints: 128 x 128 blocks with a scale each, and activations quantized on the
fly, 128 columns at a time. Parameters must keep the form they were loaded in, since the next update is copied into
them. Hence only models whose loaders read the scales are supported, and kernels that do not repack weights. Both lists
are for SGLang 0.5.15 and 0.5.17. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from attrs import frozen

from corerl.errors import ConfigError
from corerl.models import experts_of
from corerl.plugin import Problem

if TYPE_CHECKING:
    from corerl.config import ClusterInfo
    from corerl_sglang.config import SglangConfig

BLOCK = 128  # as in corerl.weights.quantize, which needs torch
MODELS = ("qwen2", "qwen3", "qwen3_moe")  # Llama's loader expects another name for scales, and skips ours
# On Hopper, DeepGEMM, which "auto" selects if installed, computes with float32 scales, as we send them.
KERNELS = {
    "fp8_gemm_runner_backend": ("auto", "deep_gemm", "triton"),
    "moe_runner_backend": ("auto", "triton"),
    "moe_a2a_backend": ("none",),
}
# From Blackwell on, "auto" rounds scales to powers of two and packs them, or shuffles experts.
PLAIN = {"fp8_gemm_runner_backend": "triton", "moe_runner_backend": "triton"}
OLDEST, PACKING = (8, 9), (10, 0)  # compute capabilities: the first with FP8, the first that packs


def quantization(left_out: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` for a model's config.json. `left_out` names the modules that are not quantized."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(left_out),
    }


def for_device(arguments: Mapping[str, Any], capability: tuple[int, int]) -> dict[str, Any]:
    """Adapt the server's arguments to a device's compute capability. Raises ConfigError if it has no FP8, or if the
    chosen kernels would repack parameters."""
    if arguments.get("quantization") != "fp8":
        return dict(arguments)
    if capability < OLDEST:
        has, wanted = (".".join(map(str, each)) for each in (capability, OLDEST))
        raise ConfigError(
            f"weights.quantize: 'fp8' needs a device of compute capability {wanted} or higher, but this one has {has}; "
            "set it to 'none'"
        )
    if capability < PACKING:
        return dict(arguments)
    for name, kernels in PLAIN.items():
        if arguments.get(name, "auto") not in ("auto", kernels):
            raise ConfigError(
                f"engines.sglang.server.{name}: {arguments[name]!r} repacks weights on this device, so updates "
                f"cannot be copied into them; remove it to use {kernels!r}"
            )
    return {**arguments, **PLAIN}


def problems(config: SglangConfig, cluster: ClusterInfo) -> Iterator[Problem]:
    """Problems of serving FP8 weights with these options."""
    if cluster.device != "cuda":
        yield Problem(".weights.quantize", "'fp8' needs a GPU; set it to 'none'")
    if cluster.train is not None and cluster.train.precision == "float32":
        yield Problem(
            ".train.precision",
            "'float32', but with weights.quantize='fp8' activations have 16 or 8 bits; set it to 'bfloat16'",
        )
    for name, kernels in KERNELS.items():
        if config.server.get(name, kernels[0]) not in kernels:
            yield Problem(
                f"server.{name}",
                f"{config.server[name]!r} may repack weights, so FP8 updates cannot be copied into them; "
                f"choose one of {', '.join(kernels)}",
            )
    model = cluster.model
    if not model:
        return
    if model.get("model_type") not in MODELS:
        yield Problem(
            ".weights.quantize",
            f"'fp8' supports models of type {', '.join(MODELS)}, got {model.get('model_type')!r}, whose scales SGLang "
            "may not read; set it to 'none'",
        )
        return
    left_out = cluster.weights.unquantized if cluster.weights else ()
    quantized: set[str] = set()
    for layer in _layers(model):
        kept = [name for name in layer.names if any(part in name for part in left_out)]
        if kept and len(kept) < len(layer.names):
            other = next(name for name in layer.names if name not in kept)
            yield Problem(
                ".weights.unquantized",
                f"leaves out {kept[0]!r} but not {other!r}, which SGLang stores in the same parameter; leave out both "
                "or neither",
            )
            return
        if not kept:
            quantized.add(layer.kind)
    yield from _cut_blocks(config, model, quantized)


@frozen
class _Layer:
    """Tensors that SGLang fuses into one parameter."""

    kind: str
    names: Sequence[str]


def _layers(model: Mapping[str, Any]) -> Iterator[_Layer]:
    experts = experts_of(model)
    step, dense = model.get("decoder_sparse_step") or 1, model.get("mlp_only_layers") or ()
    for number in range(model["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        yield _Layer("qkv", [f"{attention}.{part}_proj.weight" for part in "qkv"])
        yield _Layer("o", [f"{attention}.o_proj.weight"])
        if experts and number not in dense and not (number + 1) % step:
            parts = ("gate", "up", "down")
            names = [f"{mlp}.experts.{each}.{part}_proj.weight" for each in range(experts) for part in parts]
            yield _Layer("experts", names)
        else:
            yield _Layer("mlp", [f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"])
            yield _Layer("mlp", [f"{mlp}.down_proj.weight"])


def _cut_blocks(config: SglangConfig, model: Mapping[str, Any], quantized: Set[str]) -> Iterator[Problem]:
    """Problems of matrices whose size on one device is not a multiple of the block size."""
    if config.tensor_parallel % config.data_parallel or config.tensor_parallel % config.expert_parallel:
        return  # reported elsewhere
    heads: int = model["num_attention_heads"]
    head: int = model.get("head_dim") or model["hidden_size"] // heads
    pairs: int = model.get("num_key_value_heads") or heads
    tp = config.tensor_parallel
    attention, experts = tp // config.data_parallel, tp // config.expert_parallel
    widths = (  # kinds of layers, setting, whole width, width per device
        ({"qkv", "o", "mlp", "experts"}, "hidden_size", model["hidden_size"], model["hidden_size"]),
        ({"qkv", "o"}, "num_attention_heads", heads * head, heads // attention * head),
        ({"qkv"}, "num_key_value_heads", pairs * head, max(1, pairs // attention) * head),
        ({"mlp"}, "intermediate_size", size := model["intermediate_size"], size // tp),
        ({"experts"}, "moe_intermediate_size", size := model.get("moe_intermediate_size") or 0, size // experts),
    )
    for kinds, setting, whole, part in widths:
        if not kinds & quantized or not part % BLOCK:
            continue
        if whole % BLOCK:
            path, fix = f".model.{setting}", "set weights.quantize='none', or leave these layers out"
        else:
            path, fix = "tensor_parallel", "split the model over fewer devices"
        yield Problem(
            path,
            f"matrices with {part} rows or columns per device, from {setting}, do not divide into FP8 blocks of "
            f"{BLOCK}; {fix}",
        )
