"""Which modules mix tokens, and how, is told by their code; states are kept within each sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from corerl.errors import ModelError
from corerl.kinds import InPieces
from corerl.models.attention import PACKED, CausalMask, attention_in_pieces, register_packed_attention, run_on_rows
from corerl.models.files import meta_model
from corerl.models.parts import parts_of
from corerl.ops.packing import PackedSequences
from corerl_testing import smallest_config
from corerl_testing.models import tiny_config


def test_what_packed_attention_cannot_do_is_refused() -> None:
    register_packed_attention()
    register_packed_attention()
    q = torch.zeros(1, 2, 3, 8)
    packing = PackedSequences.of(torch.tensor([0, 3]), "cpu")
    attention = partial(ALL_ATTENTION_FUNCTIONS[PACKED], nn.Identity(), q, packing=packing)
    assert attention(q, q, CausalMask(), sliding_window=4)[0].shape == (1, 3, 2, 8)
    with pytest.raises(ModelError, match="Identity uses position_bias, dropout, which corerl_packed attention does"):
        attention(q, q, CausalMask(), position_bias=q, dropout=0.1)
    with pytest.raises(ModelError, match="uses a mask that is neither causal nor a window of that"):
        attention(q, q, torch.zeros(3, 3))
    with pytest.raises(ModelError, match="one row of packed tokens and no cache"):
        attention(torch.zeros(1, 2, 5, 8), q, CausalMask())


def skips(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key % 2 == 0


@pytest.mark.parametrize(
    ("make", "fields", "seen"),
    [
        (create_causal_mask, {}, CausalMask()),
        (create_sliding_window_causal_mask, {"sliding_window": 5}, CausalMask(window=5)),
        (create_sliding_window_causal_mask, {"sliding_window": 1}, CausalMask(window=1)),
        (partial(create_causal_mask, and_mask_function=skips), {}, None),
        (create_causal_mask, {"is_causal": False}, None),
        (create_sliding_window_causal_mask, {"sliding_window": 0}, None),
        (create_chunked_causal_mask, {"attention_chunk_size": 6}, None),
    ],
)
def test_masks_of_transformers_are_what_they_let_a_token_see(
    make: Callable[..., Any], fields: dict[str, Any], seen: CausalMask | None
) -> None:
    assert mask_of(make, fields) == seen


def mask_of(make: Callable[..., Any], fields: dict[str, Any]) -> Any:
    """What packed attention is given for a mask of transformers'."""
    register_packed_attention()
    config = tiny_config("qwen3")
    config._attn_implementation = PACKED
    for name, value in fields.items():
        setattr(config, name, value)
    embeds, mask = torch.zeros(1, 9, 64), torch.ones(1, 9, dtype=torch.long)
    return make(config, inputs_embeds=embeds, attention_mask=mask, past_key_values=None)


@pytest.mark.parametrize(
    ("model_type", "fields", "wanted"),
    [
        ("qwen3", {}, None),
        ("qwen3", {"head_dim": 256}, None),
        ("qwen3", {"head_dim": 264}, InPieces.HEADS),
        ("deepseek_v3", {}, None),
        ("gemma2", {}, InPieces.CAPS),
        ("gemma2", {"attn_logit_softcapping": None}, None),
        ("gpt_oss", {}, InPieces.SINKS),
        ("qwen3_5_text", {}, InPieces.STATE),
        ("bloom", {}, InPieces.OWN),
        ("openai-gpt", {}, InPieces.OWN),
    ],
)
def test_attention_is_one_kernel_where_that_has_everything(
    model_type: str, fields: dict[str, Any], wanted: InPieces | None
) -> None:
    decoder = parts_of(meta_model(AutoConfig.for_model(**{**smallest_config(model_type).to_dict(), **fields}))).decoder
    assert attention_in_pieces(decoder) is wanted


class Sums(nn.Module):
    """A layer whose state is the sum of what it has seen."""

    def forward(self, hidden: Tensor, scale: Tensor, past_key_values: Any = None) -> tuple[Tensor, Tensor]:
        total = hidden.cumsum(1) * scale
        return total, total[:, -1]


def test_a_layer_without_bounds_or_with_masks_is_refused() -> None:
    block = nn.ModuleDict({"mixer": Sums()})
    run_on_rows(block)
    hidden = torch.zeros(1, 4, 2)
    with pytest.raises(ModelError, match="^Sums is called without the bounds of sequences"):
        block["mixer"](hidden, scale=hidden)
    packing = PackedSequences.of(torch.tensor([0, 4]), "cpu")
    with pytest.raises(ModelError, match="^Sums computes attention with its own code"):
        block["mixer"](hidden, scale=hidden, past_key_values=CausalMask(), packing=packing)
