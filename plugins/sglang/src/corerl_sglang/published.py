"""Fields that SGLang reads in a config.json, since published models have them, and that transformers does not write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

# Model type -> what its layers do in transformers, in the words of the published config.json files.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "gpt_oss": {"swiglu_limit": 7.0},
    "minimax_m2": {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
}
INTERVAL = "full_attention_interval"  # of the layers of hybrid models, every so-manieth of which is attention


def add_published_fields(config: PreTrainedConfig) -> None:
    """Set those of the fields that `config` lacks, as it does unless it was read from a published file."""
    config = config.get_text_config()
    fields = dict(FIELDS.get(config.model_type, {}))
    layers = getattr(config, "layer_types", None) or []
    if "linear_attention" in layers and "full_attention" in layers:
        every = layers.index("full_attention") + 1
        if all((kind == "full_attention") == (at % every == 0) for at, kind in enumerate(layers, start=1)):
            fields[INTERVAL] = every
    for name, value in fields.items():
        if not hasattr(config, name):
            setattr(config, name, value)
