"""A model that does not give each token's log-prob from the tokens before it is refused, with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedConfig

from corerl.errors import ModelError
from corerl.models.build import build_on_meta
from corerl.models.files import look_at
from corerl.models.parts import parts_of
from corerl_testing import smallest_config
from corerl_testing.models import tiny_fields


class Misnamed(LlamaForCausalLM):
    """Takes its head for its decoder, as ModernBERT's decoder does."""

    def get_decoder(self) -> nn.Module:
        return self.lm_head


def test_the_decoder_is_found_whatever_the_model_takes_for_it() -> None:
    config = AutoConfig.for_model(**{**tiny_fields("qwen3"), "model_type": "llama"})
    with torch.device("meta"):
        misnamed = Misnamed(config)
    assert parts_of(misnamed).decoder is misnamed.model
    llama4 = look_at(smallest_config("llama4_text"))
    assert llama4.get_decoder() is llama4 and parts_of(llama4).decoder is llama4.model


def test_a_critic_has_no_head() -> None:
    parts = parts_of(look_at(smallest_config("gemma2"), value_head=True))
    assert parts.head is None and type(parts.decoder).__name__ == "Gemma2Model"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            smallest_config("bert", is_decoder=False),
            "lets every token see later ones with is_decoder=False.*set is_dec",
        ),
        (smallest_config("gemma3_text", use_bidirectional_attention=True), "with use_bidirectional_attention=True"),
        (smallest_config("gemma4_text", use_bidirectional_attention="all"), "with use_bidirectional_attention=all"),
        (smallest_config("xlnet"), "^XLNetLMHeadModel lets every token see later ones; use another model"),
        (smallest_config("phimoe"), "^PhimoeForCausalLM uses router_jitter_noise"),
    ],
    ids=lambda each: each.model_type if isinstance(each, PreTrainedConfig) else "",
)
def test_a_model_whose_tokens_see_later_ones_or_whose_numbers_would_change_is_refused(
    config: PreTrainedConfig, message: str
) -> None:
    model = build_on_meta(config, dtype=torch.float32, attention="eager", buffers=False)
    with pytest.raises(ModelError, match=message):
        parts_of(model)
