from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from corerl.config.schema import ModelConfig
from corerl.errors import ModelError
from corerl.models.build import architecture_of, build_on_meta
from corerl.models.config import class_name, hf_config, reads_pictures
from corerl_testing import smallest_config
from corerl_testing.models import tiny_fields


def test_a_config_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    file, model = tmp_path / "config.json", ModelConfig(path=str(tmp_path))
    file.write_text(json.dumps({**tiny_fields("qwen3"), "vocab_size": 97}))
    assert hf_config(model).vocab_size == 97
    file.write_text(json.dumps({**tiny_fields("qwen3"), "vocab_size": 101}))
    assert hf_config(model).vocab_size == 101
    file.unlink()
    with pytest.raises(ModelError, match=r"config\.json cannot be read: No such file or directory"):
        hf_config(model)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", r"config\.json is not valid JSON"),
        ("[" * 100_000, r"config\.json is not valid JSON"),
        ("[1]", "contains a list"),
        ("{}", "has no model_type"),
        (json.dumps({"model_type": "qwen33"}), "'qwen33' is unknown.*did you mean 'qwen3'"),
        (json.dumps({"model_type": "qwen3", "hidden_size": "wide"}), "hidden_size"),
        (json.dumps({"model_type": "t5"}), "'t5' is neither a causal language model nor .* has T5Model for it; use"),
        (json.dumps({"model_type": "glm4v_text"}), "has Glm4vTextModel for it; .* in place of .* part the whole one"),
    ],
)
def test_a_config_that_cannot_be_read_says_why(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=expected) as caught:
        hf_config(ModelConfig(path=str(tmp_path)))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("model_type", "fields", "name", "wrong", "told"),
    [
        ("qwen3", {"num_attention_heads": 4}, "num_key_value_heads", 3, "=3 does not divide num_attention_heads=4"),
        ("qwen3_moe", {"num_experts": 2}, "num_experts_per_tok", 3, "=3, wanted at most 2, the number of experts"),
    ],
)
def test_heads_and_experts_that_do_not_fit_are_refused(
    model_type: str, fields: dict[str, Any], name: str, wrong: int, told: str
) -> None:
    fields = {"model_type": model_type, **fields}
    with pytest.raises(ModelError) as caught:
        hf_config(ModelConfig(config={**fields, name: wrong}))
    assert caught.value.message == f"model.config.{name}{told}"
    assert getattr(hf_config(ModelConfig(config={**fields, name: 2})), name) == 2


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    config = {**tiny_fields("qwen3"), "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"is quantized \(fp8\), which CoreRL does not support; use the original model"
    ):
        hf_config(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("pad", [97, 98, -1])
def test_a_pad_token_outside_the_vocabulary_is_none(pad: int, tmp_path: Path) -> None:
    fields = {**tiny_fields("llama"), "vocab_size": 97, "pad_token_id": pad}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for model in (ModelConfig(path=str(tmp_path)), ModelConfig(config=fields)):
        config = hf_config(model)
        assert config.pad_token_id is None
        assert build_on_meta(config, dtype=torch.float32, attention="eager").get_input_embeddings().padding_idx is None
    assert hf_config(ModelConfig(config={**fields, "pad_token_id": 96})).pad_token_id == 96


@pytest.mark.parametrize(
    ("model_type", "named", "wanted"),
    [
        ("qwen3_5", ["Qwen3_5ForConditionalGeneration"], "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5", ["Qwen3_5ForCausalLM"], "Qwen3_5ForCausalLM"),
        ("qwen3_5", None, "Qwen3_5ForCausalLM"),
        ("qwen3_5", ["MyModel"], "Qwen3_5ForCausalLM"),  # which transformers does not have for it
        ("qwen3_vl", ["Qwen2ForCausalLM"], "Qwen3VLForConditionalGeneration"),
        ("qwen3", ["Qwen3ForSequenceClassification"], "Qwen3ForCausalLM"),
        ("qwen3", 1, "Qwen3ForCausalLM"),  # as a damaged file may have it
        ("gemma3", None, "Gemma3ForConditionalGeneration"),
        ("gemma3_text", None, "Gemma3ForCausalLM"),
    ],
)
def test_a_model_is_of_the_class_that_its_config_names(model_type: str, named: Any, wanted: str) -> None:
    config = smallest_config(model_type)
    vars(config)["architectures"] = named  # transformers 5.12 would check what is set
    assert (class_name(config), architecture_of(config).__name__) == (wanted, wanted)
    assert reads_pictures(config) == ("ForConditionalGeneration" in wanted)


@pytest.mark.parametrize(
    ("model_type", "way_out"),
    [
        ("gemma3", "use model_type 'gemma3_text', or set model.path"),
        ("qwen3_vl", "set model.path"),  # whose text half is no type of its own
    ],
)
def test_fields_of_a_model_that_reads_pictures_are_refused(model_type: str, way_out: str) -> None:
    with pytest.raises(ModelError, match=f"has parts for pictures .* cannot begin at random; {way_out}"):
        hf_config(ModelConfig(config={"model_type": model_type}))
