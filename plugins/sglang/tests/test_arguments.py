"""A config.json that transformers writes has what SGLang reads, in the words of published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from corerl_sglang.arguments import add_published_fields
from corerl_testing import smallest_config
from tests.pictures import pictures_config

FIELDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gpt_oss": {"swiglu_limit": 7.0},
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "minimax_m2": {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
    "qwen3_5_text": {"full_attention_interval": 4},
}


@pytest.mark.parametrize("model_type", FIELDS)
def test_a_config_gets_the_fields_that_it_lacks(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    before = config.to_dict()
    add_published_fields(config)
    assert {name: getattr(config, name) for name in FIELDS[model_type]} == FIELDS[model_type]
    assert {**config.to_dict(), **before} == config.to_dict()


def test_the_interval_is_that_of_the_models_own_layers() -> None:
    config = smallest_config("qwen3_next", layer_types=["linear_attention", "full_attention"])
    add_published_fields(config)
    assert config.full_attention_interval == 2


def test_the_limit_is_that_of_transformers_code() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    assert GptOssExperts(smallest_config("gpt_oss")).limit == 7.0


def test_a_tower_without_deep_features_says_so(tmp_path: Path) -> None:
    config = pictures_config("qwen3_5")
    add_published_fields(config)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    assert written["deepstack_visual_indexes"] == []  # without the field SGLang takes [8, 16, 24]
    deep = pictures_config("qwen3_vl")
    add_published_fields(deep)
    assert deep.vision_config.deepstack_visual_indexes == [0]
