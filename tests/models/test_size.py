from __future__ import annotations

from transformers import AutoConfig

from corerl.kinds import InPieces
from corerl.models.files import look_at
from corerl.models.size import size_of
from corerl_testing.models import tiny_fields


def test_a_models_size_is_that_of_its_parts() -> None:
    fields = tiny_fields("qwen3-moe")
    model = look_at(AutoConfig.for_model(**fields))
    found = size_of(model)
    assert found.total == sum(param.numel() for param in model.parameters())
    expert = 3 * fields["hidden_size"] * fields["moe_intermediate_size"]
    assert found.experts == (fields["num_experts"] * expert,) * fields["num_hidden_layers"]
    assert found.embedding == fields["vocab_size"] * fields["hidden_size"] and found.rest == fields["hidden_size"]
    tied = size_of(look_at(AutoConfig.for_model(**{**fields, "tie_word_embeddings": True})))
    untied = size_of(look_at(AutoConfig.for_model(**{**fields, "tie_word_embeddings": False})))
    assert (tied.head, untied.head) == (0, untied.embedding)
    critic = size_of(look_at(AutoConfig.for_model(**fields), value_head=True))
    assert critic.head == fields["hidden_size"]
    wide = size_of(look_at(AutoConfig.for_model(**{**fields, "head_dim": 264})))
    assert (found.in_pieces, wide.in_pieces) == (None, InPieces.HEADS)
