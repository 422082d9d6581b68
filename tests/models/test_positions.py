from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from corerl.models.files import look_at
from corerl.models.positions import position_rows

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "fields", "rows"),
    [
        ("gpt2", {"n_positions": 48}, 48),
        ("gpt2", {"n_positions": 64}, 64),  # as many as tokens
        ("opt", {"max_position_embeddings": 48, "word_embed_proj_dim": 64, "ffn_dim": 96}, 48),
        ("gpt_neo", {"max_position_embeddings": 48, "attention_types": [[["global"], 2]]}, 48),
        ("gptj", {"n_positions": 48, "rotary_dim": 8}, 48),  # of sines, in a buffer
        ("qwen3", {"max_position_embeddings": 48}, None),
        ("qwen3", {"max_position_embeddings": 64}, None),  # as many as tokens
        ("llama", {"max_position_embeddings": 48, "intermediate_size": 48}, None),
        ("bloom", {}, None),
    ],
)
def test_only_models_with_a_table_end_at_a_position(kind: str, fields: dict[str, Any], rows: int | None) -> None:
    assert position_rows(look_at(AutoConfig.for_model(kind, **{**SIZES, **fields}))) == rows
