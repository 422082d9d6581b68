from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from corerl.models.config import context_length
from corerl.models.files import look_at
from corerl.models.positions import position_limit

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "fields", "positions"),
    [
        ("gpt2", {"n_positions": 48}, 48),
        ("gpt2", {"n_positions": 64}, 64),  # as many as tokens
        ("opt", {"max_position_embeddings": 48, "word_embed_proj_dim": 64, "ffn_dim": 96}, 48),
        ("gpt_neo", {"max_position_embeddings": 48, "attention_types": [[["global"], 2]]}, 48),
        ("gptj", {"n_positions": 48, "rotary_dim": 8}, 48),  # of sines, in a buffer
        ("mpt", {"max_seq_len": 48}, 48),  # biases of the scores, made in the pass
        ("xglm", {"max_position_embeddings": 48, "num_layers": 2, "attention_heads": 4}, None),  # sines that it adds to
        ("qwen3", {"max_position_embeddings": 48}, None),
        ("qwen3", {"max_position_embeddings": 64}, None),  # as many as tokens
        ("qwen3_moe", {"max_position_embeddings": 48, "num_experts": 4, "moe_intermediate_size": 32}, None),
        ("llama", {"max_position_embeddings": 48, "intermediate_size": 48}, None),
        ("bloom", {}, None),
    ],
)
def test_only_models_that_fail_beyond_a_position_end_there(
    kind: str, fields: dict[str, Any], positions: int | None
) -> None:
    config = AutoConfig.for_model(kind, **{**SIZES, **fields})
    assert position_limit(look_at(config), wanted=65) == positions
    assert context_length(config) == next(iter(fields.values()), None)  # the default length, of all that name one
    if positions is not None:
        assert position_limit(look_at(config), wanted=positions) is None
