from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from corerl.kinds import experts_of


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"model_type": "qwen3"}, 0),
        ({"model_type": "qwen3_moe", "num_experts": 6}, 6),
        ({"model_type": "mixtral", "num_local_experts": 3}, 3),
        ({"model_type": "deepseek_v3", "n_routed_experts": 5}, 5),
        ({"model_type": "ernie4_5_moe", "moe_num_experts": 7}, 7),
        ({"model_type": "dbrx", "ffn_config": {"moe_num_experts": 9}}, 9),
    ],
)
def test_experts_are_counted_in_the_fields_that_transformers_writes(fields: dict[str, Any], count: int) -> None:
    assert experts_of(AutoConfig.for_model(**fields).to_dict()) == count
