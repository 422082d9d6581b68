"""What is refused before a rank is started, and what a model is in Megatron's words."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from attrs import evolve
from megatron.core.transformer import TransformerConfig

from corerl.config import ClusterInfo, TrainConfig
from corerl.errors import PluginError
from corerl_megatron.config import MegatronConfig
from corerl_megatron.families import BRIDGE_INSTALL, FAMILIES, architecture, unsupported_by
from corerl_megatron.model import uses_transformer_engine
from corerl_megatron.spec import SPEC, check
from corerl_testing import TRAIN, smallest_config, tiny_config
from plugins.megatron.tests.test_families import YARN
from plugins.megatron.tests.test_rope import LLAMA3

QWEN3 = tiny_config("qwen3-deep").to_dict()  # 4 layers, 4 heads, 2 key-value heads, 96 columns
MOE = tiny_config("qwen3-moe").to_dict()  # 8 experts
GLM = tiny_config("glm4-moe").to_dict()
KINDS = ("gpt_oss", "deepseek_v3", "youtu", "gemma3_text")
GPT_OSS, DEEPSEEK, YOUTU, GEMMA = (smallest_config(kind).to_dict() for kind in KINDS)


HEADS = {**MOE, "num_key_value_heads": 64, "num_attention_heads": 64}
ODD = {**GLM, "moe_intermediate_size": 33}
SP = {"tensor_parallel": 2, "sequence_parallel": True}


def told(
    ranks: int, model: dict[str, Any], device: str = "cpu", train: TrainConfig = TRAIN, **options: Any
) -> list[str]:
    found = check(MegatronConfig(**options), ClusterInfo(device=device, ranks=ranks, model=model, train=train))
    return [f"{problem.path}: {problem.text}" for problem in found]


@pytest.mark.parametrize(
    ("ranks", "model", "options"),
    [
        (1, QWEN3, {}),
        (4, QWEN3, {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2}),
        (8, MOE, {"expert_parallel": 8}),
        (1, {**QWEN3, "attention_dropout": 0.1}, {}),  # no backend draws any
        (1, {**MOE, "num_experts_per_tok": 1, "norm_topk_prob": False}, {}),
        (4, MOE, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 4, "expert_tensor_parallel": 1}),
        (2, GPT_OSS, {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 1}),
        (8, DEEPSEEK, {"pipeline_parallel": 2, "context_parallel": 2, "expert_parallel": 4}),
        (2, YOUTU, {"tensor_parallel": 2, "sequence_parallel": True}),
    ],
)
def test_a_layout_that_divides_is_let_through(ranks: int, model: dict[str, Any], options: dict[str, Any]) -> None:
    assert told(ranks, model, **options) == []


@pytest.mark.parametrize(
    ("ranks", "model", "options", "line"),
    [
        (3, QWEN3, {"tensor_parallel": 2}, "tensor_parallel: 2, with pipeline_parallel=1 and context_parallel=1,"),
        (6, MOE, {"expert_parallel": 2, "pipeline_parallel": 2}, "expert_parallel: 2, with expert_tensor_parallel=1"),
        (1, QWEN3, {"virtual_pipeline": 2}, "virtual_pipeline: 2, but there is only one stage to interleave"),
        (4, QWEN3, {"tensor_parallel": 4}, "tensor_parallel: 4 does not divide the model's 2 key-value heads"),
        (3, QWEN3, {"pipeline_parallel": 3}, "pipeline_parallel: 3 does not divide the model's 4 layers"),
        (4, QWEN3, {"pipeline_parallel": 4, "virtual_pipeline": 2}, "pipeline_parallel: 4 x virtual_pipeline=2"),
        (2, QWEN3, {"expert_parallel": 2}, "expert_parallel: 2, but the model has no experts"),
        (2, QWEN3, {"expert_tensor_parallel": 2}, "expert_tensor_parallel: 2, but the model has no experts; set it"),
        (128, HEADS, {**SP, "expert_tensor_parallel": 64, "tensor_parallel": 32}, "expert_tensor_parallel: 64 does"),
        (2, {**MOE, "moe_intermediate_size": 33}, SP, "tensor_parallel: 2 does not divide the model's 33 columns"),
        (2, MOE, {"tensor_parallel": 2}, "sequence_parallel: false, but experts with tensor_parallel=2"),
        (2, ODD, {**SP, "expert_tensor_parallel": 1}, "tensor_parallel: 2 does not divide the model's 33 columns of"),
        (2, GPT_OSS, {"tensor_parallel": 2, "sequence_parallel": True}, "expert_tensor_parallel: 0 with"),
        (1, GPT_OSS, {"native_checkpoint": True}, "native_checkpoint: true, but the experts of a gpt_oss model keep"),
        (2, YOUTU, {"tensor_parallel": 2}, "sequence_parallel: false, but latent attention with tensor_parallel=2"),
    ],
)
def test_one_that_does_not_is_refused_under_its_setting(
    ranks: int, model: dict[str, Any], options: dict[str, Any], line: str
) -> None:
    assert any(found.startswith(line) for found in told(ranks, model, **options)), told(ranks, model, **options)


def test_routers_without_a_softmax_are_not_balanced() -> None:
    balancing = evolve(TRAIN, aux_loss_coef=0.1)
    assert told(1, MOE, train=balancing) == []
    (said,) = told(1, GLM, train=balancing)
    assert said.startswith(".train.aux_loss_coef: 0.1, but the routers of a glm4_moe model have no softmax")


def test_layers_are_recomputed_in_groups_that_divide_a_stages() -> None:
    recomputing, options = evolve(TRAIN, recompute="full"), {"pipeline_parallel": 2, "recompute_layers": 3}
    (said,) = told(2, QWEN3, train=recomputing, **options)
    assert said.startswith("recompute_layers: 3 does not divide the 2 layers of a stage")
    assert told(2, QWEN3, train=recomputing, **{**options, "recompute_layers": 2}) == []
    for without in ({"recompute_method": "block"}, {"recompute": "mlp"}):
        assert told(2, QWEN3, train=recomputing, **options, **without) == []
    assert told(2, QWEN3, **options) == []


def test_transformer_engine_is_not_to_divide_contexts_in_float32() -> None:
    options = {"context_parallel": 2, "transformer": "transformer_engine"}
    (said,) = told(2, QWEN3, "cuda", **options)  # float32
    assert said.startswith("transformer: 'transformer_engine', but TransformerEngine has no attention for context_par")
    assert told(2, QWEN3, "cuda", train=evolve(TRAIN, precision="bfloat16"), **options) == []
    assert told(2, QWEN3, "cuda", **{**options, "transformer": "auto"}) == []


def test_transformer_engine_is_taken_or_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert uses_transformer_engine(MegatronConfig(), "bfloat16", gpu)
    assert not uses_transformer_engine(MegatronConfig(), "bfloat16", cpu)
    assert not uses_transformer_engine(MegatronConfig(transformer="torch"), "bfloat16", gpu)
    assert uses_transformer_engine(MegatronConfig(), "float32", gpu)
    divided = MegatronConfig(context_parallel=2)
    assert uses_transformer_engine(divided, "bfloat16", gpu)
    assert not uses_transformer_engine(divided, "float32", gpu)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not uses_transformer_engine(MegatronConfig(), "bfloat16", gpu)
    for asked in ({"transformer": "transformer_engine"}, {"fp8": "e4m3"}):
        ((name, value),) = asked.items()
        with pytest.raises(PluginError) as raised:
            uses_transformer_engine(MegatronConfig(**asked), "bfloat16", gpu)  # type: ignore[arg-type]
        assert raised.value.message.startswith(f"backends.megatron.{name}={value!r} needs TransformerEngine")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model_type": "olmo3"}, f"model_type 'olmo3' is not supported by this backend, only {', '.join(FAMILIES)}; "),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type 'dynamic' is not supported"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, "rope low_freq_factor=2.0 is not supported by"),
        ({"rope_parameters": {**YARN, "attention_factor": 2.0}}, "rope attention_factor=2.0 is not supported by"),
        ({**GLM, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, "rope_type 'yarn' of a part of each"),
        ({**DEEPSEEK, "rope_parameters": LLAMA3}, "rope_type 'llama3' of a deepseek_v3 model is not supported"),
        ({**DEEPSEEK, "rope_parameters": {**YARN, "truncate": False}}, "rope truncate=false, or mscale_all_dim"),
        ({**DEEPSEEK, "rope_interleave": False}, "rope_interleave=false is not supported by megatron-core"),
        ({**GLM, "norm_topk_prob": False}, "norm_topk_prob=false of a router with sigmoids is not supported"),
        ({**GPT_OSS, "attention_bias": False}, "attention_bias=false of a gpt_oss model is not supported"),
        ({**GPT_OSS, "swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported by megatron-core, only 1.702"),
        ({"attention_bias": True}, "attention_bias of a qwen3 model is not supported"),
        ({**GEMMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping of a gemma3_text model is not supported"),
        ({**GEMMA, "hidden_activation": "silu"}, "hidden_activation='silu' is not supported by this backend, only"),
        (
            {**GEMMA, "rope_parameters": {"full_attention": YARN, "sliding_attention": LLAMA3}},
            "rope_type 'llama3' in layers with windows is not supported by this backend, only default",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ],
)
def test_a_model_that_megatron_would_train_wrongly_is_refused(changed: dict[str, Any], reason: str) -> None:
    assert unsupported_by({**QWEN3, **changed}).startswith(reason)
    assert told(1, {**QWEN3, **changed}) == [f".model: {unsupported_by({**QWEN3, **changed})}"]


@pytest.mark.parametrize(
    ("device", "options", "lines"),
    [
        ("cuda", {}, []),
        ("cuda", {"pipeline_parallel": 2, "expert_parallel": 2}, []),
        ("cpu", {}, ["bridge: true, but the device is cpu, and its models are made of TransformerEngine's layers"]),
        ("cuda", {"transformer": "torch"}, ["bridge: true, but transformer is 'torch', and its models are made of"]),
        ("cuda", {"context_parallel": 2}, ["bridge: true, but TransformerEngine has no attention for"]),
        ("cuda", {"fp8": "e4m3"}, ["bridge: true with fp8='e4m3', which has not been tried"]),
        ("cuda", SP, ["tensor_parallel: 2, but Megatron-Bridge's norms of all heads of a minimax_m2 model are summed"]),
        ("cuda", {"expert_parallel": 3}, ["expert_parallel: 3 does not divide the model's 8 experts"]),
    ],
)
def test_what_can_be_told_without_the_bridge_is(
    monkeypatch: pytest.MonkeyPatch, device: str, options: dict[str, Any], lines: list[str]
) -> None:
    model = {**MOE, "model_type": "minimax_m2"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    found = told(12, model, device, bridge=True, **options)
    assert [line[: len(begin)] for line, begin in zip(found, lines, strict=True)] == lines
    if not lines:
        layers = model["num_hidden_layers"] // options.get("pipeline_parallel", 1)
        train = evolve(TRAIN, precision="bfloat16", recompute="full")
        (said,) = told(12, model, device, bridge=True, train=train, **{**options, "recompute_layers": layers + 1})
        assert said.startswith(f"recompute_layers: {layers + 1} does not divide the {layers} layers of a stage")
        assert told(12, model, device, bridge=True, train=train, **{**options, "recompute_layers": layers}) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "megatron.bridge" else object())
    assert told(2, QWEN3, "cuda", bridge=True) == [
        f"bridge: true, but megatron-bridge is not installed; {BRIDGE_INSTALL}"
    ]


def test_a_router_whose_one_choice_always_weighs_1_is_refused() -> None:
    chosen = {**MOE, "num_experts_per_tok": 1, "norm_topk_prob": True}
    assert unsupported_by(chosen).startswith("norm_topk_prob=true with num_experts_per_tok=1")
    with pytest.raises(ValueError, match="pre-softmax when topk is 1"):  # if not, megatron-core takes it now
        TransformerConfig(**architecture(chosen, value_head=False).transformer)
    assert unsupported_by({**chosen, "num_experts_per_tok": 2}) == ""


def test_ranks_that_share_a_sample_are_one_data_parallel_group() -> None:
    options = MegatronConfig(tensor_parallel=2, pipeline_parallel=2, context_parallel=2, expert_parallel=2)
    assert SPEC.data_parallel(options, ClusterInfo(device="cpu", ranks=16)) == 2


def test_the_environment_is_of_gpus_alone() -> None:
    options = MegatronConfig(tensor_parallel=2, nvls=False)
    on_gpus = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_NVLS_ENABLE": "0", "NVIDIA_TF32_OVERRIDE": "0"}
    assert SPEC.environment(options, ClusterInfo(device="cuda", ranks=2)) == on_gpus
    alone = evolve(options, tensor_parallel=1, nvls=True)
    gpus = ClusterInfo(device="cuda", ranks=2)
    assert SPEC.environment(alone, gpus) == {"NVIDIA_TF32_OVERRIDE": "0"}
    assert SPEC.environment(options, ClusterInfo(device="cpu", ranks=2)) == {}
