"""Count a model's experts from the fields of its Hugging Face config. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Model families use different names, and transformers 5.15 and later write Qwen3-MoE's "num_experts" as the second.
NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def experts_of(fields: Mapping[str, Any]) -> int:
    """The number of experts that a layer of the text decoder chooses from; 0 for a dense model. `fields` are those of
    `config.to_dict()` or config.json."""
    parts = (fields, fields.get("text_config"), fields.get("ffn_config"))  # the last is DBRX's
    counts = (part.get(name) for part in parts if isinstance(part, Mapping) for name in NAMES)
    return max((count for count in counts if isinstance(count, int)), default=0)  # of another type: it is not built
