"""Models that packing would change are refused before they have weights; others are what transformers computes, on
sequences of which none sees another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedConfig

from corerl.errors import ModelError
from corerl.models.attention import PACKED
from corerl.models.build import build_on_meta, materialize, recompute_layers
from corerl.models.packable import longest_sequence, require_packable
from corerl.models.policy import CausalPolicy
from corerl.ops.attention import PackedSequences
from corerl.testing.models import tiny_fields
from corerl.types import Output

SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**tiny_fields("qwen3"), "model_type": "llama"}


def policy_of(config: PreTrainedConfig) -> CausalPolicy:
    model = build_on_meta(config, dtype=torch.float32, attention=PACKED)
    generator = torch.Generator().manual_seed(0)
    drawn = {
        name: nn.Parameter((param.dim() == 1) + 0.15 * torch.randn(param.shape, generator=generator))
        for name, param in model.named_parameters()
    }
    materialize(model, drawn)
    return CausalPolicy(model)


def logprobs(policy: CausalPolicy, *sequences: torch.Tensor) -> torch.Tensor:
    lengths = [len(each) for each in sequences]
    packing = PackedSequences.of(torch.tensor([0, *lengths]).cumsum(0), "cpu")
    positions = torch.cat([torch.arange(length) for length in lengths])
    return policy(torch.cat(sequences), packing, positions, 1.0, (Output.LOGPROBS,))[Output.LOGPROBS]


def drawn(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "bloom"}, "^BloomForCausalLM computes attention with its own code"),
        ({"model_type": "falcon"}, "^FalconForCausalLM computes attention with its own code"),
        ({"model_type": "bert", "is_decoder": True}, "^BertLMHeadModel has its head at 'cls.predictions.decoder'"),
        ({"model_type": "mistral"}, "^MistralForCausalLM has sliding_window=4096 in all layers"),
        (
            {"model_type": "phimoe", "num_key_value_heads": 2},
            "^PhimoeForCausalLM uses router_jitter_noise",
        ),
        (
            {"model_type": "electra", "embedding_size": 32, "is_decoder": True},
            "^ElectraForCausalLM changes the decoder's hidden states before its head",
        ),
        (
            {"model_type": "llama4_text", "layer_types": ["full_attention"] * 2, "num_key_value_heads": 2},
            "^Llama4ForCausalLM returns Llama4ForCausalLM as its decoder",
        ),
    ],
    ids=str,
)
def test_a_model_that_the_pass_would_change_is_refused_before_it_has_weights(
    fields: dict[str, Any], message: str
) -> None:
    config = AutoConfig.for_model(**fields, **SMALL)
    with pytest.raises(ModelError, match=message):
        CausalPolicy(build_on_meta(config, dtype=torch.float32, attention=PACKED))


class Halved(LlamaForCausalLM):
    """Like a family that scales hidden states by a field of its config that CoreRL does not know."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids, **kwargs).last_hidden_state
        return self.lm_head(hidden * 0.5)  # type: ignore[no-any-return]


class Misnamed(LlamaForCausalLM):
    """Takes its head for its decoder, as ModernBERT's decoder does."""

    def get_decoder(self) -> nn.Module:
        return self.lm_head


def test_a_decoder_that_does_not_turn_tokens_into_hidden_states_is_refused() -> None:
    with torch.device("meta"), pytest.raises(ModelError, match="^Misnamed returns Linear as its decoder"):
        require_packable(Misnamed(AutoConfig.for_model(**LLAMA)))


def test_hidden_states_that_are_not_the_heads_input_as_they_are_are_refused_with_and_without_weights() -> None:
    config = AutoConfig.for_model(**LLAMA)
    for device in ("meta", "cpu"):
        with torch.device(device), pytest.raises(ModelError, match="^Halved changes the decoder's hidden states"):
            require_packable(Halved(config))
        with torch.device(device):
            model = LlamaForCausalLM(config)
            require_packable(model)
        assert "forward" not in vars(model.model) and not model.lm_head._forward_pre_hooks


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
