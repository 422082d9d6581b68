"""A model that does not give each token's log-prob from the tokens before it is refused, with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedConfig

from corerl.errors import ModelError
from corerl.kinds import InPieces
from corerl.models.build import build_on_meta
from corerl.models.files import meta_model
from corerl.models.parts import parts_of, size_of
from corerl_testing import smallest_config
from corerl_testing.models import drawn_model, tiny_fields
from tests.models.passes import drawn, passed, policy_of


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            smallest_config("bert", is_decoder=False),
            "lets every token see later ones with is_decoder=False.*set is_dec",
        ),
        (smallest_config("gemma3_text", use_bidirectional_attention=True), "with use_bidirectional_attention=True"),
        (smallest_config("gemma4_text", use_bidirectional_attention="all"), "with use_bidirectional_attention=all"),
        (smallest_config("phimoe"), "^PhimoeForCausalLM uses router_jitter_noise"),
    ],
    ids=lambda each: each.model_type if isinstance(each, PreTrainedConfig) else "",
)
def test_a_model_whose_tokens_see_later_ones_is_refused(config: PreTrainedConfig, message: str) -> None:
    model = build_on_meta(config, dtype=torch.float32, attention="eager", buffers=False)
    with pytest.raises(ModelError, match=message):
        parts_of(model)


LLAMA = AutoConfig.for_model(
    "llama", hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=97, intermediate_size=32
)


class Looking(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        output = self.model(input_ids=input_ids, use_cache=False, output_attentions=True)
        return self.lm_head(output.last_hidden_state + output.attentions[0].sum())


class Embedding(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        embedded = 2 * self.model.embed_tokens(input_ids)
        output = self.model(inputs_embeds=embedded, use_cache=False)
        return SimpleNamespace(logits=self.lm_head(output.last_hidden_state))


def test_what_follows_the_decoder_reads_its_own_parameters() -> None:
    model = drawn_model(smallest_config("bert"))
    policy, called = policy_of(model, "packed"), []
    for name, module in policy.model.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    passed(policy, drawn(8))
    assert called and all(name.startswith("bert.") for name in called if name != "bert")
    read = {id(param): name for name, param in policy.model.named_parameters()}
    assert [read[id(param)] for param in policy.head_parameters] == [
        "cls.predictions.transform.dense.weight",
        "cls.predictions.transform.dense.bias",
        "cls.predictions.transform.LayerNorm.weight",
        "cls.predictions.transform.LayerNorm.bias",
        "bert.embeddings.word_embeddings.weight",
        "cls.predictions.bias",
    ]


@pytest.mark.parametrize(
    ("kind", "message"), [(Looking, "needs more than hidden states"), (Embedding, "is not called with the tokens")]
)
def test_a_head_that_needs_more_than_states_is_refused(kind: type[LlamaForCausalLM], message: str) -> None:
    with torch.device("meta"), pytest.raises(ModelError, match=f"^CoreRL cannot separate the decoder .* {message}"):
        parts_of(kind(LLAMA))


def test_a_models_size_is_that_of_its_parts() -> None:
    fields = tiny_fields("qwen3-moe")
    model = meta_model(AutoConfig.for_model(**fields))
    found = size_of(model)
    assert found.total == sum(param.numel() for param in model.parameters())
    expert = 3 * fields["hidden_size"] * fields["moe_intermediate_size"]
    assert found.experts == (fields["num_experts"] * expert,) * fields["num_hidden_layers"]
    assert found.embedding == fields["vocab_size"] * fields["hidden_size"] and found.rest == fields["hidden_size"]
    tied = size_of(meta_model(AutoConfig.for_model(**{**fields, "tie_word_embeddings": True})))
    untied = size_of(meta_model(AutoConfig.for_model(**{**fields, "tie_word_embeddings": False})))
    assert (tied.head, untied.head) == (0, untied.embedding)
    critic = size_of(meta_model(AutoConfig.for_model(**fields), value_head=True))
    assert critic.head == fields["hidden_size"]
    wide = size_of(meta_model(AutoConfig.for_model(**{**fields, "head_dim": 264})))
    assert (found.in_pieces, wide.in_pieces) == (None, InPieces.HEADS)
