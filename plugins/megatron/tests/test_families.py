"""Every family of the table: log-probs of transformers, in layouts too, and runs that go on elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModel

from corerl.types import Output
from corerl_megatron.families import FAMILIES
from corerl_megatron.layers import TorchRMSNorm
from corerl_megatron.model import PackedModel
from corerl_testing import (
    LOGPROBS,
    Runs,
    different,
    drawn_model,
    in_order,
    make_samples,
    smallest_config,
    transformers_outputs,
)
from corerl_testing.scenarios import training

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
IN_TURNS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
# What the smallest config of a type leaves out, of what is here.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"use_sliding_window": True, **IN_TURNS},
    "qwen3": {"use_sliding_window": True, **IN_TURNS},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    "smollm3": {"use_sliding_window": True, "no_rope_layers": [1, 0], **IN_TURNS},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "gemma3_text": {"query_pre_attn_scalar": 24},
    "mixtral": {"sliding_window": 8},
    "qwen2_moe": {"norm_topk_prob": False},
    # More experts of a token than megatron-core's own choice among groups, two of each, reckons with.
    "glm4_moe": {"attention_bias": True, "use_qk_norm": True, "n_group": 4, "topk_group": 3, "num_experts_per_tok": 3},
    "dots1": {"norm_topk_prob": True, **IN_TURNS},
    "deepseek_v3": {"rms_norm_eps": 1e-3, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "youtu": {"q_lora_rank": None},
    "gpt_oss": {"rope_parameters": {**YARN, "truncate": False}},
}
TP2 = {"tensor_parallel": 2}
SP2 = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_parallel": 2}
CP2 = {"context_parallel": 2}
EP2 = {"expert_parallel": 2}
WHOLE_EXPERTS = {**SP2, "expert_tensor_parallel": 1}
LAYOUTS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "phi3": [TP2],  # several parts in one tensor
    "mistral": [CP2],  # windows
    "granite": [PP2],  # scales
    "gemma3_text": [SP2, CP2],  # norms after attention and MLP, two ropes
    "qwen2_moe": [SP2],  # a weighted shared expert
    "glm4_moe": [SP2, PP2, EP2],
    "deepseek_v3": [PP2, CP2, EP2],
    "youtu": [SP2],  # latent attention without compressed queries
    "gpt_oss": [WHOLE_EXPERTS, CP2, {**WHOLE_EXPERTS, **EP2}],
}


def drawn(model_type: str, directory: Path) -> Path:
    """A model with weights large enough that every part of it shows in log-probs."""
    fields = {"initializer_range": 0.1, **FIELDS.get(model_type, {})}
    drawn_model(smallest_config(model_type, **fields)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("model_type", FAMILIES)
def test_log_probs_are_transformers_and_weights_the_files(runs: Runs, tmp_path: Path, model_type: str) -> None:
    family = Runs(runs.rank_sets, {model_type: drawn(model_type, tmp_path)})
    at_start = family.train(1, family.setup("megatron", model_type), []).at_start
    loaded = {**at_start["master"], **at_start.get("buffer", {})}
    assert different({"all": loaded}, {"all": load_file(tmp_path / "model.safetensors")}, ["all"]) == []
    samples = make_samples(7, samples=13)
    wanted = transformers_outputs(tmp_path, samples)[Output.LOGPROBS]
    for options in ({}, *LAYOUTS.get(model_type, ())):
        setup, ranks = evolve(family.setup("megatron", model_type), options=options), 2 if options else 1
        found = in_order(family.rank_sets[ranks].run(training.forward_only, setup, samples), samples, Output.LOGPROBS)
        np.testing.assert_allclose(found, wanted, rtol=LOGPROBS.relative, atol=LOGPROBS.absolute, err_msg=f"{options}")


@pytest.mark.parametrize("model_type", ["gemma3_text", "granite"])
def test_embeddings_in_bfloat16_are_scaled_as_transformers_scales_them(model_type: str) -> None:
    """By a number that bfloat16 does not have."""
    fields = {"granite": {"embedding_multiplier": 10.1}, "gemma3_text": {}}[model_type]
    sizes = {"hidden_size": 48, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    hf = AutoConfig.for_model(model_type, num_hidden_layers=1, vocab_size=97, pad_token_id=0, **sizes, **fields)
    model = AutoModel.from_config(hf, dtype=torch.bfloat16)
    seen: list[torch.Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    tokens = torch.arange(1, 97)[None]
    model(input_ids=tokens)
    family = FAMILIES[model_type]
    table = torch.nn.Embedding(97, 48, _weight=model.get_input_embeddings().weight.detach())
    holder: Any = SimpleNamespace(embedding=table, config=SimpleNamespace(params_dtype=torch.bfloat16))
    PackedModel.scale_embeddings(holder, family.embedding_scale(hf.to_dict()), rounded=family.rounds_scale)
    assert torch.equal(table(tokens), seen[0])


def test_centered_norms_in_bfloat16_are_rounded_once() -> None:
    config: Any = SimpleNamespace(
        layernorm_zero_centered_gamma=True,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        sequence_parallel=False,
    )
    norm = TorchRMSNorm(config, 64, eps=1e-6)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(100, 64, generator=draw).bfloat16()
    torch.nn.init.normal_(norm.weight, std=0.1, generator=draw)
    exact = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-6).rsqrt() * (1 + norm.weight.double())
    assert ((norm(x) - exact) / exact).abs().max() < 1.001 * 2**-8  # the most that rounding to bfloat16 changes
