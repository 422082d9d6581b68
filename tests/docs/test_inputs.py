"""Every field of what users bring has its place in the tables of docs/reference/inputs.md."""

from __future__ import annotations

import contextlib
from types import ModuleType

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError
from openai.types.chat import completion_create_params
from transformers import GenerationConfig
from transformers.models.auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from corerl.models.peft_files import PLAIN
from corerl.plan.experts import FURTHER, TERMS
from tests.docs.test_reference import DOCS, module_at

SEVERAL = "musicgen"  # has several text configs


@pytest.fixture(scope="module")
def inputs() -> ModuleType:
    return module_at(DOCS / "_ext/inputs.py")


def fields_of_models() -> set[str]:
    found: set[str] = set()
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        # There is a class whose own defaults do not pass its check.
        with contextlib.suppress(StrictDataclassClassValidationError):
            if not model_type.startswith(SEVERAL):
                found |= CONFIG_MAPPING[model_type]().get_text_config().to_dict().keys()
    return found


def test_every_field_of_a_models_config_has_its_place(inputs: ModuleType) -> None:
    fields = fields_of_models()
    assert len(fields) > 500
    assert {name for name in fields if inputs.rule_of(name, inputs.MODEL, inputs.ARCHITECTURE) is None} == set()
    assert inputs.rule_of("a_new_field", inputs.MODEL, inputs.ARCHITECTURE) is None


def test_every_field_of_a_generation_config_has_its_place(inputs: ModuleType) -> None:
    assert {name for name in vars(GenerationConfig()) if inputs.rule_of(name, inputs.GENERATION) is None} == set()
    assert inputs.rule_of("a_new_field", inputs.GENERATION) is None


def test_every_field_of_a_chat_request_has_its_place(inputs: ModuleType) -> None:
    fields = completion_create_params.CompletionCreateParamsBase.__annotations__
    assert {name for name in fields if inputs.rule_of(name, inputs.REQUEST) is None} == set()
    assert inputs.rule_of("a_new_field", inputs.REQUEST) is None


@pytest.mark.parametrize(
    ("rules", "name", "becomes"),
    [
        ("MODEL", "attention_dropout", "noted"),
        ("MODEL", "router_jitter_noise", "noted"),
        *(("MODEL", name, "noted") for name in (*TERMS, *FURTHER)),
        ("MODEL", "rope_theta", "used"),
        ("MODEL", "quantization_config", "refused"),
        ("GENERATION", "repetition_penalty", "noted"),
        ("REQUEST", "reasoning_effort", "refused"),
        ("ADAPTERS", "lora_dropout", "ignored"),
        *(("ADAPTERS", name, "refused") for name in PLAIN),
    ],
)
def test_a_field_becomes_what_the_page_says(inputs: ModuleType, rules: str, name: str, becomes: str) -> None:
    known = inputs.ARCHITECTURE if rules == "MODEL" else ()
    assert inputs.rule_of(name, getattr(inputs, rules), known).becomes == becomes
    assert f"| {becomes} |" in inputs.inputs_reference()
