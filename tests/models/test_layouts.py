"""Which way a model is passed through, and why, is one answer for config check, the run and its ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from packaging.version import Version
from torch import nn
from transformers import AutoConfig

from corerl.errors import ModelError
from corerl.models.build import VALUE_HEAD, build_on_meta, materialize
from corerl.models.config import context_length
from corerl.models.files import meta_model
from corerl.models.layouts import (
    Layout,
    PackedPolicy,
    WholePolicy,
    choose_layout,
    make_policy,
    own_attention,
    position_limit,
    require_packed_attention,
    unread_parameters,
)
from corerl.models.parts import parts_of
from corerl.ops import packing
from corerl.ops.packing import Rectangles, rectangles
from corerl.types import Output
from corerl_testing import smallest_config
from corerl_testing.models import drawn_model, tiny_config, tiny_fields
from tests.models.passes import LENGTHS, assert_same, by_the_book, drawn, passed, policy_of

OWN = "computes attention with its own code"
NOT_PACKED = {
    "bloom": rf"BloomForCausalLM {OWN} \(BloomAttention\), which treats packed sequences as",
    "openai-gpt": rf"OpenAIGPTLMHeadModel {OWN} \(OpenAIGPTModel\)",
    "deepseek_v32": rf"DeepseekV32ForCausalLM {OWN} \(DeepseekV32Indexer\)",
    "recurrent_gemma": f"RecurrentGemma.* {OWN}",
    "codegen": "CodeGenAttention is called without the bounds of sequences",
    "jamba": "JambaMambaMixer is called without the bounds of sequences",
    "mamba": "MambaMixer is called without the bounds of sequences",
    "llama4_text": "Llama4ForCausalLM numbers the positions of tokens in its own way",  # to scale queries by them
    "roberta": "RobertaForCausalLM numbers the positions of tokens in its own way",
    "bart": "BartDecoder takes no position_ids, which packed sequences need",
    "doge": "DogeModel cannot be called with packed sequences .*'CausalMask' object has no attribute",
    "jetmoe": "JetMoeModel cannot be called with packed sequences",  # what it attends with depends on values
    "nemotron": "Nemotron",  # how its attention loses the bounds of sequences differs between versions of transformers
}


@pytest.mark.parametrize("model_type", NOT_PACKED)
def test_a_model_that_cannot_be_packed_says_why(model_type: str) -> None:
    model = meta_model(smallest_config(model_type))
    chosen = choose_layout(model, "auto")
    assert chosen.name == "whole" and re.match(NOT_PACKED[model_type], chosen.why)
    assert choose_layout(model, "whole") == Layout("whole")
    with pytest.raises(ModelError) as refused:
        choose_layout(model, "packed")
    assert refused.value.message == f"{chosen.why}; set train.layout to 'auto' or 'whole'"


@pytest.mark.parametrize("asked", ["auto", "whole"])
def test_a_model_that_is_neither_packed_nor_whole_is_refused(asked: str) -> None:
    with pytest.raises(ModelError, match="^XLNetLMHeadModel lets every token see later ones; use another model$"):
        choose_layout(meta_model(smallest_config("xlnet")), asked)


def test_the_policy_has_its_layout_and_the_fastest_attention() -> None:
    qwen3, gpt_oss = tiny_config("qwen3"), smallest_config("gpt_oss")
    assert (own_attention(qwen3), own_attention(gpt_oss)) == ("sdpa", "eager")
    assert isinstance(make_policy(qwen3, dtype=torch.float32), PackedPolicy)
    for config, own in ((qwen3, "sdpa"), (gpt_oss, "eager")):
        policy = make_policy(config, dtype=torch.bfloat16, layout="whole", value_head=True)
        assert isinstance(policy, WholePolicy) and policy.rectangular
        assert policy.model.config._attn_implementation == own
        assert policy.value_head is not None and policy.value_head.weight.dtype is torch.bfloat16
    with pytest.raises(ModelError, match="; set train.layout to 'auto' or 'whole'$"):
        make_policy(smallest_config("bloom"), dtype=torch.float32, layout="packed")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("idefics", "IdeficsForVisionText2Text cannot be called with text alone (ValueError: Exactly 1"),
        ("florence2", "Florence2ForConditionalGeneration has an encoder, which lets every token see later ones"),
        ("blip-2", "CoreRL cannot separate the decoder of Blip2ForConditionalGeneration from its head: what follows"),
    ],
)
def test_a_model_that_reads_pictures_must_pass_text_alone(model_type: str, reason: str) -> None:
    with pytest.raises(ModelError) as refused:
        choose_layout(meta_model(smallest_config(model_type)), "auto")
    assert refused.value.message.startswith(reason)


def test_a_decoder_may_be_given_the_embeddings_of_tokens() -> None:
    config = smallest_config("llama4")
    config.architectures = ["Llama4ForConditionalGeneration"]
    model = meta_model(config)
    found = parts_of(model)
    assert type(found.decoder).__name__ == "Llama4TextModel" and found.head is not None
    assert found.head.linear is model.get_output_embeddings()


LLAMA = {**tiny_fields("qwen3"), "model_type": "llama"}


def test_looking_at_a_model_leaves_it_as_it_was() -> None:
    model = meta_model(smallest_config("qwen3_5_text"))
    require_packed_attention(parts_of(model).decoder)
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ModelError, match="was built with 'eager' attention, expected 'corerl_packed'"):
        PackedPolicy(model)


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
def test_frequencies_that_follow_the_longest_sequence_are_bounded(rope: dict[str, Any], positions: int) -> None:
    config = AutoConfig.for_model(**{**LLAMA, "max_position_embeddings": positions, "rope_parameters": rope})
    policy, (short, full, longer) = policy_of(drawn_model(config), "auto"), drawn(10, 32, 33)
    alone, beside = (passed(policy, rows)[Output.LOGPROBS][:10] for rows in ([short], [short, full]))
    torch.testing.assert_close(beside, alone, rtol=0, atol=1e-5)
    with pytest.raises(ModelError, match=r"^LlamaForCausalLM .* has more than 32 tokens, and one has 33; use shorter"):
        passed(policy, [short, longer])


@pytest.mark.parametrize(
    ("model_type", "unread"), [("bart", "encoder_attn"), ("qwen3_5_text", ""), ("gemma3_text", "")]
)
def test_weights_that_no_pass_reads_are_known(model_type: str, unread: str) -> None:
    model = meta_model(smallest_config(model_type))
    found = unread_parameters(model)
    assert found == {name for name, _ in model.named_parameters() if unread and unread in name}


# Their layers tell each other the bounds of sequences only in newer versions of transformers; in others they are whole.
NEWER = ("mamba2", "falcon_h1", "nemotron_h", "lfm2")
KINDS = [
    "llama",
    "qwen3_moe",
    "gpt2",  # positions are learned, layers have another name
    "gemma2",  # caps in attention and on logits, alternating windows
    "gemma3_text",  # another rotary base in windows
    "cohere2",  # a scale of logits; layers without positions
    "granite",  # scales everywhere
    "gpt_oss",  # sinks, windows, experts
    "mistral",  # a window in all layers
    "olmo3",
    "deepseek_v3",  # latent attention
    "minimax",  # lightning attention
    "mamba2",  # a state space
    "falcon_h1",  # attention beside a state space
    "nemotron_h",  # layers of either kind, and of neither
    "qwen3_5_text",  # gated delta net
    "lfm2",  # short convolutions
    "bert",  # layers between decoder and head
    "modernbert-decoder",  # takes its head for its decoder
]


def require_packed(model_type: str) -> None:
    if model_type in NEWER and Version(transformers.__version__) < Version("5.23"):
        chosen = choose_layout(meta_model(smallest_config(model_type)), "auto")
        if "is called without the bounds of sequences" in chosen.why:
            pytest.skip(f"whole with transformers {transformers.__version__}")


@pytest.mark.parametrize("model_type", KINDS)
def test_packed_sequences_give_what_the_model_gives_each_alone(model_type: str) -> None:
    require_packed(model_type)
    model = drawn_model(smallest_config(model_type))
    policy, sequences = policy_of(model, "packed"), drawn(*LENGTHS)
    got = passed(policy, sequences)
    assert_same(policy, got, dict(model.named_parameters()), by_the_book(model, sequences))


SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "fields", "positions"),
    [
        ("gpt2", {"n_positions": 48}, 48),
        ("gpt2", {"n_positions": 64}, 64),  # as many as tokens
        ("opt", {"max_position_embeddings": 48, "word_embed_proj_dim": 64, "ffn_dim": 96}, 48),
        ("gpt_neo", {"max_position_embeddings": 48, "attention_types": [[["global"], 2]]}, 48),
        ("gptj", {"n_positions": 48, "rotary_dim": 8}, 48),  # of sines, in a buffer
        ("xglm", {"max_position_embeddings": 48, "num_layers": 2, "attention_heads": 4}, 48),
        ("qwen3", {"max_position_embeddings": 48}, None),
        ("qwen3", {"max_position_embeddings": 64}, None),  # as many as tokens
        ("qwen3_moe", {"max_position_embeddings": 48, "num_experts": 4, "moe_intermediate_size": 32}, None),
        ("llama", {"max_position_embeddings": 48, "intermediate_size": 48}, None),
        ("bloom", {}, None),
    ],
)
def test_only_models_with_a_table_of_positions_end_with_it(
    kind: str, fields: dict[str, Any], positions: int | None
) -> None:
    config = AutoConfig.for_model(kind, **{**SIZES, **fields})
    assert position_limit(meta_model(config), wanted=65) == positions
    assert context_length(config) == next(iter(fields.values()), None)  # the default length, of all that name one
    if positions is not None:
        assert position_limit(meta_model(config), wanted=positions) is None


@pytest.mark.parametrize("model_type", ["gemma2", "qwen3_next", "mamba2"])
def test_no_sequence_changes_with_its_padding_or_with_the_others(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, (short, longer) = policy_of(drawn_model(smallest_config(model_type)), "whole"), drawn(9, 20)
    alone, together = (passed(policy, rows)[Output.LOGPROBS][:9] for rows in ([short], [short, longer]))
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    other, *_ = drawn(20, seed=3)
    # Not to the last bit: where a tensor lies in memory decides how a CPU adds up its ends.
    torch.testing.assert_close(passed(policy, [short, other])[Output.LOGPROBS][:9], together, rtol=0, atol=1e-6)

    def padded_with_the_first_token(*args: Any, **kwargs: Any) -> Rectangles:
        rows = rectangles(*args, **kwargs)
        gather = rows.gather.copy()
        gather[[cell for cell in range(len(gather)) if cell not in rows.scatter]] = 0
        return evolve(rows, gather=gather)

    monkeypatch.setattr(packing, "rectangles", padded_with_the_first_token)
    torch.testing.assert_close(passed(policy, [short, longer])[Output.LOGPROBS][:9], together, rtol=0, atol=1e-6)


# ---- experts, critics ------------------------------------------------------------------------------------------------


def test_experts_are_reported_and_replayed_whatever_the_padding() -> None:
    model = drawn_model(tiny_config("qwen3-moe"))
    rows, packed, sequences = policy_of(model, "whole"), policy_of(model, "packed"), drawn(*LENGTHS)
    chosen = []
    for policy in (rows, packed):
        with torch.no_grad(), policy.routers.replaying(None, keep=True):
            passed(policy, sequences)
            chosen.append(policy.routers.chosen)
    assert torch.equal(*chosen)
    others = (chosen[0].long() + 1) % 8
    others[::3] = -1  # where the router chooses
    found = []
    for policy in (rows, packed):
        with policy.routers.replaying(others):
            got = passed(policy, sequences, (Output.LOGPROBS,))[Output.LOGPROBS]
            got.sum().backward()
        found.append(got)
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    for one, other in zip(rows.parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-4)


def test_values_come_from_hidden_states_before_each_token() -> None:
    config = smallest_config("gemma2")
    built = build_on_meta(config, dtype=torch.float32, attention="eager", value_head=True)
    generator = torch.Generator().manual_seed(0)
    params = {
        name: nn.Parameter(0.2 * torch.randn(p.shape, generator=generator)) for name, p in built.named_parameters()
    }
    policy = WholePolicy(built)
    materialize(built, params)
    sequences = drawn(*LENGTHS)
    got = passed(policy, sequences, (Output.VALUES,))[Output.VALUES]
    wanted = []
    for each in sequences:
        hidden = built.get_decoder()(input_ids=each[None], use_cache=False).last_hidden_state[0, :-1]
        wanted += [torch.zeros(1), built.get_submodule(VALUE_HEAD)(hidden)[:, 0]]
    torch.testing.assert_close(got, torch.cat(wanted), rtol=0, atol=1e-5)
    assert [id(each) for each in policy.head_parameters] == [id(params["value_head.weight"])]
    with pytest.raises(ModelError, match="a critic cannot compute entropy, logprobs"):
        passed(policy, sequences)
    with pytest.raises(ModelError, match="a policy cannot compute values"):
        passed(policy_of(drawn_model(tiny_config("qwen3")), "packed"), sequences, (Output.VALUES,))
