"""Models that packing would change are refused before they have weights; others are what transformers computes, on
sequences of which none sees another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from corerl.errors import ModelError
from corerl.models.attention import PACKED
from corerl.models.build import build_on_meta, materialize, recompute_layers
from corerl.models.files import look_at
from corerl.models.packable import (
    longest_sequence,
    require_packable,
    require_packed_attention,
    unread_parameters,
)
from corerl.models.packed import PackedPolicy
from corerl.models.parts import parts_of
from corerl.ops.attention import PackedSequences
from corerl.types import Output
from corerl_testing import smallest_config
from corerl_testing.models import tiny_fields

SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**tiny_fields("qwen3"), "model_type": "llama"}


def policy_of(config: PreTrainedConfig) -> PackedPolicy:
    model = build_on_meta(config, dtype=torch.float32, attention=PACKED)
    generator = torch.Generator().manual_seed(0)
    drawn = {
        name: nn.Parameter((param.dim() == 1) + 0.15 * torch.randn(param.shape, generator=generator))
        for name, param in model.named_parameters()
    }
    materialize(model, drawn)
    return PackedPolicy(model)


def logprobs(policy: PackedPolicy, *sequences: torch.Tensor) -> torch.Tensor:
    lengths = [len(each) for each in sequences]
    packing = PackedSequences.of(torch.tensor([0, *lengths]).cumsum(0), "cpu")
    positions = torch.cat([torch.arange(length) for length in lengths])
    return policy(torch.cat(sequences), packing, positions, 1.0, (Output.LOGPROBS,))[Output.LOGPROBS]


def drawn(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (length,), generator=generator) for length in lengths]


def require(config: PreTrainedConfig) -> None:
    model = look_at(config)
    decoder = parts_of(model).decoder
    require_packable(model, decoder)
    require_packed_attention(decoder)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("bloom", r"^BloomForCausalLM computes attention with its own code \(BloomAttention\)"),
        ("openai-gpt", r"^OpenAIGPTLMHeadModel computes attention with its own code \(OpenAIGPTModel\)"),
        ("codegen", "^CodeGenAttention is called without the bounds of sequences"),
        ("jamba", "^JambaMambaMixer is called without the bounds of sequences"),
        (
            "llama4_text",
            "^Llama4ForCausalLM numbers the positions of tokens in its own way",
        ),  # to scale queries by them
        ("roberta", "^RobertaForCausalLM numbers the positions of tokens in its own way"),
        ("bart", "^BartDecoder cannot be told the positions of tokens, which in packed sequences begin anew"),
        ("doge", "^DogeModel cannot be called with packed sequences .*'Seen' object has no attribute"),
        ("deepseek_v32", r"^DeepseekV32ForCausalLM computes attention with its own code \(DeepseekV32Indexer\)"),
        ("recurrent_gemma", "^RecurrentGemma.* computes attention with its own code"),
        ("jetmoe", "^JetMoeModel cannot be called with packed sequences"),  # what it attends with depends on values
    ],
)
def test_a_model_that_cannot_be_packed_says_why_before_it_has_weights(model_type: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        require(smallest_config(model_type))


def test_looking_at_a_model_leaves_it_as_it_was() -> None:
    model = look_at(smallest_config("qwen3_5_text"))
    require_packed_attention(parts_of(model).decoder)
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ModelError, match="was built with 'eager' attention, expected 'corerl_packed'"):
        PackedPolicy(model)


def test_a_model_whose_layers_have_another_name_is_recomputed_and_says_what_transformers_says() -> None:
    config = AutoConfig.for_model("gpt2", **SMALL, n_positions=64)
    policy, sequences = policy_of(config), drawn(8, 12)
    recompute_layers(policy.model)
    got = logprobs(policy, *sequences)
    plain = build_on_meta(config, dtype=torch.float32, attention="eager")
    materialize(plain, dict(policy.model.named_parameters()))
    for sequence, found in zip(sequences, got.split([8, 12]), strict=True):
        wanted = plain(sequence[None]).logits[0, :-1].log_softmax(-1).gather(-1, sequence[1:, None])[:, 0]
        torch.testing.assert_close(found[1:], wanted, rtol=0, atol=1e-5)
    got.sum().backward()
    assert all(param.grad is not None for param in policy.parameters())


LONG = {
    "rope_theta": 1e4,
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + each for each in range(8)],
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize(("rope", "positions"), [(LONG, 128), (DYNAMIC, 32)], ids=["longrope", "dynamic"])
def test_rotary_frequencies_that_follow_the_longest_sequence_are_taken_as_long_as_they_do_not(
    rope: dict[str, Any], positions: int
) -> None:
    config = AutoConfig.for_model(**{**LLAMA, "max_position_embeddings": positions, "rope_parameters": rope})
    policy, (short, full, longer) = policy_of(config), drawn(10, 32, 33)
    alone = logprobs(policy, short)
    torch.testing.assert_close(logprobs(policy, short, full)[:10], alone, rtol=0, atol=1e-5)
    with pytest.raises(ModelError, match=r"^LlamaForCausalLM .* has more than 32 tokens, and one has 33; use shorter"):
        logprobs(policy, short, longer)


def test_other_rotary_frequencies_have_no_limit_and_one_table_for_each_type_of_layer_counts() -> None:
    yarn = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert longest_sequence(AutoConfig.for_model(**{**LLAMA, "rope_parameters": yarn})) is None
    assert longest_sequence(AutoConfig.for_model(**LLAMA)) is None
    nested = AutoConfig.for_model(**LLAMA)
    nested.rope_parameters = {"full_attention": LONG, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert longest_sequence(nested) == 32


@pytest.mark.parametrize(
    ("model_type", "unread"), [("bart", "encoder_attn"), ("qwen3_5_text", ""), ("gemma3_text", "")]
)
def test_weights_that_no_pass_reads_are_known(model_type: str, unread: str) -> None:
    model = look_at(smallest_config(model_type))
    found = unread_parameters(model, parts_of(model))
    assert found == {name for name, _ in model.named_parameters() if unread and unread in name}
