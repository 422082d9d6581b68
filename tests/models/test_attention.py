from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from corerl.errors import ModelError
from corerl.models.attention import PACKED, Seen, register_packed_attention
from corerl.ops.attention import PackedSequences
from corerl_testing.models import tiny_config

Load = Callable[[Path, str], PreTrainedModel]


def test_a_forward_without_packing_fails_instead_of_mixing_sequences(tiny_models: dict[str, Path], load: Load) -> None:
    model, ones = load(tiny_models["qwen3"], PACKED), torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ModelError, match="Qwen3Attention calls its attention without the bounds"):
        model(ones, attention_mask=ones, use_cache=False)


def test_what_packed_attention_cannot_do_is_refused() -> None:
    register_packed_attention()
    register_packed_attention()
    q = torch.zeros(1, 2, 3, 8)
    packing = PackedSequences.of(torch.tensor([0, 3]), "cpu")
    attention = partial(ALL_ATTENTION_FUNCTIONS[PACKED], nn.Identity(), q, packing=packing)
    assert attention(q, q, Seen(), sliding_window=4)[0].shape == (1, 3, 2, 8)
    with pytest.raises(ModelError, match="Identity uses position_bias, dropout, which corerl_packed attention does"):
        attention(q, q, Seen(), position_bias=q, dropout=0.1)
    with pytest.raises(ModelError, match="uses a mask that is neither causal nor a window of that"):
        attention(q, q, torch.zeros(3, 3))
    with pytest.raises(ModelError, match="one row of packed tokens and no cache"):
        attention(torch.zeros(1, 2, 5, 8), q, Seen())


def skips(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key % 2 == 0


@pytest.mark.parametrize(
    ("make", "fields", "seen"),
    [
        (create_causal_mask, {}, Seen()),
        (create_sliding_window_causal_mask, {"sliding_window": 5}, Seen(window=5)),
        (create_sliding_window_causal_mask, {"sliding_window": 1}, Seen(window=1)),
        (partial(create_causal_mask, and_mask_function=skips), {}, None),
        (create_causal_mask, {"is_causal": False}, None),
        (create_sliding_window_causal_mask, {"sliding_window": 0}, None),
        (create_chunked_causal_mask, {"attention_chunk_size": 6}, None),
    ],
)
def test_masks_of_transformers_are_what_they_let_a_token_see(
    make: Callable[..., Any], fields: dict[str, Any], seen: Seen | None
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
