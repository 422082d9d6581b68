"""Which way a model is passed through, and why, is one answer for config check, the run and its ranks."""

from __future__ import annotations

import pytest
import torch

from corerl.errors import ModelError
from corerl.models.files import look_at
from corerl.models.layout import Layout, choose_layout, make_policy, own_attention
from corerl.models.packed import PackedPolicy
from corerl.models.parts import parts_of
from corerl.models.whole import WholePolicy
from corerl_testing import smallest_config
from corerl_testing.models import tiny_config

NOT_PACKED = {
    "bloom": "BloomForCausalLM computes attention with its own code (BloomAttention), which treats packed sequences as",
    "doge": "DogeModel cannot be called with packed sequences",
    "mamba": "MambaMixer is called without the bounds of sequences",
    "nemotron": "Nemotron",  # how its attention loses the bounds of sequences differs between versions of transformers
}


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "gpt2", "emu3", "gemma3", "bert", "qwen3_5"])
def test_a_model_that_qualifies_is_packed_unless_it_shall_be_whole(model_type: str) -> None:
    model = look_at(smallest_config(model_type))
    assert choose_layout(model, "auto") == choose_layout(model, "packed") == Layout("packed")
    assert choose_layout(model, "whole") == Layout("whole")


@pytest.mark.parametrize("model_type", NOT_PACKED)
def test_another_model_is_whole_and_says_why_and_cannot_be_packed(model_type: str) -> None:
    model = look_at(smallest_config(model_type))
    chosen = choose_layout(model, "auto")
    assert chosen.name == "whole" and chosen.why.startswith(NOT_PACKED[model_type])
    assert choose_layout(model, "whole") == Layout("whole")
    with pytest.raises(ModelError) as refused:
        choose_layout(model, "packed")
    assert refused.value.message == f"{chosen.why}; set train.layout to 'auto' or 'whole'"


@pytest.mark.parametrize("asked", ["auto", "whole"])
def test_a_model_that_goes_neither_way_is_refused_with_what_keeps_it_from_being_whole(asked: str) -> None:
    with pytest.raises(ModelError, match="^XLNetLMHeadModel lets every token see later ones; use another model$"):
        choose_layout(look_at(smallest_config("xlnet")), asked)


def test_the_policy_is_of_that_layout_and_with_the_fastest_attention_there_is() -> None:
    qwen3, gpt_oss = tiny_config("qwen3"), smallest_config("gpt_oss")
    assert (own_attention(qwen3), own_attention(gpt_oss)) == ("sdpa", "eager")
    assert isinstance(make_policy(qwen3, dtype=torch.float32), PackedPolicy)
    for config, attention in ((qwen3, "sdpa"), (gpt_oss, "eager")):
        policy = make_policy(config, dtype=torch.bfloat16, layout="whole", value_head=True)
        assert isinstance(policy, WholePolicy) and policy.rectangular
        assert policy.model.config._attn_implementation == attention
        assert policy.value_head is not None and policy.value_head.weight.dtype is torch.bfloat16
    with pytest.raises(ModelError, match="; set train.layout to 'auto' or 'whole'$"):
        make_policy(smallest_config("bloom"), dtype=torch.float32, layout="packed")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        (
            "idefics",
            "IdeficsForVisionText2Text cannot be called with text alone (ValueError: Exactly 1",
        ),
        ("florence2", "Florence2ForConditionalGeneration has an encoder, which lets every token see later ones"),
        (
            "blip-2",
            "CoreRL cannot tell the decoder of Blip2ForConditionalGeneration from what follows it: what follows",
        ),
    ],
)
def test_a_model_that_reads_pictures_must_pass_text_alone(model_type: str, reason: str) -> None:
    with pytest.raises(ModelError) as refused:
        choose_layout(look_at(smallest_config(model_type)), "auto")
    assert refused.value.message.startswith(reason)


def test_a_decoder_may_be_given_the_embeddings_of_tokens() -> None:
    config = smallest_config("llama4")
    config.architectures = ["Llama4ForConditionalGeneration"]
    model = look_at(config)
    found = parts_of(model)
    assert type(found.decoder).__name__ == "Llama4TextModel" and found.head is not None
    assert found.head.linear is model.get_output_embeddings()
