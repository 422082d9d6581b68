from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from corerl.config.schema import ModelConfig
from corerl.errors import ModelError
from corerl.models.build import architecture_of, build_on_meta
from corerl.models.config import class_name, context_length, experts, hf_config, reads_pictures, require_ranges
from corerl_testing import smallest_config
from corerl_testing.models import tiny_fields


def test_a_directory_and_its_fields_give_the_same_config(tiny_models: dict[str, Path]) -> None:
    from_path = hf_config(ModelConfig(path=str(tiny_models["qwen3-moe"])))
    from_fields = hf_config(ModelConfig(config=tiny_fields("qwen3-moe")))
    differing = {
        name for name, value in from_fields.to_diff_dict().items() if from_path.to_diff_dict().get(name, value) != value
    }
    assert not differing
    assert from_fields.architectures == from_path.architectures == ["Qwen3MoeForCausalLM"]


def test_a_config_is_the_callers_own_and_read_again_when_its_file_changes(tmp_path: Path) -> None:
    file, model = tmp_path / "config.json", ModelConfig(path=str(tmp_path))
    file.write_text(json.dumps({**tiny_fields("qwen3"), "vocab_size": 97}))
    hf_config(model).vocab_size = 1
    assert hf_config(model).vocab_size == 97
    file.write_text(json.dumps({**tiny_fields("qwen3"), "vocab_size": 101}))
    assert hf_config(model).vocab_size == 101
    file.unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        hf_config(model)


def test_experts_are_counted_by_whatever_name_a_config_has_for_them() -> None:
    assert experts(hf_config(ModelConfig(config=tiny_fields("qwen3")))) == 1
    assert experts(hf_config(ModelConfig(config={**tiny_fields("qwen3-moe"), "num_experts": 6}))) == 6
    assert experts(hf_config(ModelConfig(config={"model_type": "mixtral", "num_local_experts": 3}))) == 3


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere.*is not a directory"):
        hf_config(ModelConfig(path=str(tmp_path / "nowhere")))


def test_a_directory_without_config_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match=r"no config\.json, found weights\.bin"):
        hf_config(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", r"config\.json is not valid JSON"),
        ("[" * 200_000, r"config\.json is not valid JSON: it is nested more deeply than can be read"),
        ("[1]", "contains a list"),
        ("{}", "has no model_type"),
        (json.dumps({"model_type": "qwen33"}), "'qwen33' is unknown.*did you mean 'qwen3'"),
        (json.dumps({"model_type": "qwen3", "hidden_size": "wide"}), "hidden_size"),
        (json.dumps({"model_type": "t5"}), "'t5' is neither a causal language model nor an image-text model"),
    ],
)
def test_a_config_that_cannot_be_read_says_why(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=expected) as caught:
        hf_config(ModelConfig(path=str(tmp_path)))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("initializer_range", math.nan, "a finite number, at least 0"),
        ("attention_dropout", 2, "a number, at least 0, at most 1"),
        ("attention_dropout", -0.1, "a number, at least 0, at most 1"),
        ("rms_norm_eps", -1e-6, "a finite number, at least 0"),
        ("rope_theta", 0, "a finite number above 0"),
        ("rope_theta", -10000.0, "a finite number above 0"),
        ("rope_scaling", {"rope_type": "linear", "factor": 0.0}, "a finite number above 0"),
        ("rope_scaling", {"rope_type": "linear", "factor": math.inf}, "a finite number above 0"),
    ],
)
def test_a_number_that_no_model_can_have_is_refused(tmp_path: Path, field: str, value: Any, wanted: str) -> None:
    fields = {**tiny_fields("qwen3"), field: value}
    name = "factor" if isinstance(value, dict) else field
    number = value["factor"] if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for model in (ModelConfig(config=fields), ModelConfig(path=str(tmp_path))):
        with pytest.raises(ModelError, match=rf"{name}={re.escape(str(number))}, wanted {wanted}$"):
            hf_config(model)


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("granite", "logits_scaling", 0.0),
        ("gemma2", "final_logit_softcapping", 0.0),
        ("deepseek_v3", "routed_scaling_factor", math.nan),
        ("gpt2", "resid_pdrop", 1.5),
        ("falcon_h1", "lm_head_multiplier", -math.inf),
    ],
)
def test_numbers_of_other_models_have_ranges_too(model_type: str, field: str, value: float) -> None:
    with pytest.raises(ModelError, match=rf"{field}={value}, wanted "):
        hf_config(ModelConfig(config={"model_type": model_type, field: value}))


def test_each_models_own_numbers_are_within_their_ranges() -> None:
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with contextlib.suppress(StrictDataclassError):  # of a class or two, by version
            require_ranges(CONFIG_MAPPING[model_type]().to_dict(), f"{model_type}: ")


def test_a_misspelt_field_is_answered_with_the_nearest() -> None:
    fields = {**tiny_fields("qwen3"), "hiden_size": 64}
    with pytest.raises(ModelError, match=r"model\.config\.hiden_size is not a field.*'hidden_size'"):
        hf_config(ModelConfig(config=fields))


def test_heads_that_cannot_share_keys_and_values_are_refused() -> None:
    fields = {"model_type": "qwen3", "num_attention_heads": 4}
    with pytest.raises(ModelError) as caught:
        hf_config(ModelConfig(config={**fields, "num_key_value_heads": 3}))
    assert caught.value.message == "model.config.num_key_value_heads=3 does not divide num_attention_heads=4"
    assert hf_config(ModelConfig(config={**fields, "num_key_value_heads": 2})).num_key_value_heads == 2


def test_heads_of_an_odd_size_are_refused_if_rotary_positions_turn_all_of_it(tmp_path: Path) -> None:
    odd = {"model_type": "qwen2", "hidden_size": 63, "num_attention_heads": 4, "num_key_value_heads": 2}
    said = "numbers per head, which rotary positions turn in pairs; wanted an even number"
    with pytest.raises(ModelError) as caught:
        hf_config(ModelConfig(config=odd))
    assert caught.value.message == f"model.config.hidden_size=63 / num_attention_heads=4 makes 15 {said}"
    (tmp_path / "config.json").write_text(json.dumps({**odd, "model_type": "qwen3", "head_dim": 3}))
    with pytest.raises(ModelError) as caught:
        hf_config(ModelConfig(path=str(tmp_path)))
    assert caught.value.message == f"model.path='{tmp_path}': config.json: head_dim=3 {said}"
    for accepted in (
        {**odd, "model_type": "qwen3", "head_dim": 32},  # which need not divide the hidden size
        {**odd, "hidden_size": 66},
        {"model_type": "gpt_neox", "hidden_size": 60, "num_attention_heads": 4},  # turns a quarter of each head
        {"model_type": "reformer"},  # no rotary positions
    ):
        assert hf_config(ModelConfig(config=accepted)).model_type == accepted["model_type"]


@pytest.mark.parametrize(("kind", "field"), [("qwen3", "num_hidden_layers"), ("gpt2", "n_layer"), ("qwen3", "n_layer")])
def test_more_layers_than_a_config_can_list_are_refused(kind: str, field: str, tmp_path: Path) -> None:
    fields = {"model_type": kind, field: 10**9}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for model in (ModelConfig(config=fields), ModelConfig(path=str(tmp_path))):
        with pytest.raises(ModelError, match=f"{field}=1000000000, wanted at most 10000$"):
            hf_config(model)


def test_older_names_of_fields_are_taken() -> None:
    config = hf_config(ModelConfig(config={**tiny_fields("qwen3"), "rope_theta": 5e5}))
    assert config.rope_parameters["rope_theta"] == 5e5


def test_a_model_of_nothing_says_what_to_set() -> None:
    with pytest.raises(ModelError, match=r"set model\.path.*or model\.config"):
        hf_config(ModelConfig())


def test_a_quantized_model_is_refused_since_its_numbers_are_not_the_weights(tmp_path: Path) -> None:
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


def test_a_context_is_as_long_as_the_model_has_positions() -> None:
    assert context_length(hf_config(ModelConfig(config=tiny_fields("qwen3")))) == 512
    without = hf_config(ModelConfig(config={"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4}))
    assert context_length(without) is None


def test_a_config_whose_layers_differ_in_their_sizes_is_read(tmp_path: Path) -> None:
    smallest_config("gemma4_text").save_pretrained(tmp_path)
    assert hf_config(ModelConfig(path=str(tmp_path))).model_type == "gemma4_text"


@pytest.mark.parametrize(
    ("model_type", "named", "wanted"),
    [
        ("qwen3_5", ["Qwen3_5ForConditionalGeneration"], "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5", ["Qwen3_5ForCausalLM"], "Qwen3_5ForCausalLM"),
        ("qwen3_5", None, "Qwen3_5ForCausalLM"),
        ("qwen3_5", ["MyModel"], "Qwen3_5ForCausalLM"),  # which transformers does not have for it
        ("qwen3_vl", ["Qwen2ForCausalLM"], "Qwen3VLForConditionalGeneration"),
        ("qwen3", ["Qwen3ForSequenceClassification"], "Qwen3ForCausalLM"),
        ("gemma3", None, "Gemma3ForConditionalGeneration"),
        ("gemma3_text", None, "Gemma3ForCausalLM"),
    ],
)
def test_a_model_is_of_the_class_that_its_config_names(model_type: str, named: list[str] | None, wanted: str) -> None:
    config = smallest_config(model_type)
    config.architectures = named
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
