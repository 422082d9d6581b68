"""Every field of what users bring has its place in the tables of docs/reference/inputs.md."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable
from types import ModuleType

import attrs
import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from corerl.checkpoint import commit
from corerl.checkpoint.format import RankIndex, SavedBox
from corerl.config.schema import DataConfig
from corerl.data.media import FIELD
from corerl.driver.run import Run
from corerl_doctor.advice import FURTHER
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


def fields_of_tokenizers() -> set[str]:
    sources = [inspect.getsource(each.__init__) for each in (PreTrainedTokenizerBase, PreTrainedTokenizerFast)]
    fields = {name for each in sources for name in re.findall(r'kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)"', each)}
    return fields | {"tokenizer_class", "auto_map", *PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES}


def fields_of_messages() -> set[str]:
    from openai.types import chat  # slow to import, and all processes of pytest collect this file

    kinds = [getattr(chat, kind) for kind in vars(chat) if kind.endswith("MessageParam")]
    return {name for kind in kinds for name in getattr(kind, "__annotations__", ())}


def fields_of_checkpoints() -> set[str]:
    fields = {each.name for kind in (RankIndex, SavedBox) for each in attrs.fields(kind)}
    written = inspect.getsource(commit).partition("content = json.loads(json.dumps(")[2].splitlines()[:2]
    state = inspect.getsource(Run).partition("state = {")[2].partition("\n        }")[0]
    fields |= set(re.findall(r'"(\w+)":', "\n".join([state, *written]))) - {"state"}
    assert fields >= {"format", "files", "crc32", "rollout_step", "schedules", "before", "boxes"}
    return fields


@pytest.mark.parametrize(
    ("rules", "fields", "least"),
    [
        ("MODEL", fields_of_models, 500),
        ("GENERATION", lambda: set(vars(GenerationConfig())), 40),
        ("TOKENIZER", fields_of_tokenizers, 40),
        ("MESSAGE", fields_of_messages, 6),
        ("CHECKPOINT", fields_of_checkpoints, 7),
    ],
)
def test_every_field_has_its_place(inputs: ModuleType, rules: str, fields: Callable[[], set[str]], least: int) -> None:
    known, found = inputs.ARCHITECTURE if rules == "MODEL" else (), fields()
    assert len(found) > least
    assert {name for name in found if inputs.rule_of(name, getattr(inputs, rules), known) is None} == set()
    assert inputs.rule_of("a_new_field", getattr(inputs, rules), known) is None


def test_every_setting_of_a_rows_fields_has_its_place(inputs: ModuleType) -> None:
    keys = {each.name for each in attrs.fields(DataConfig) if each.name.endswith("_key")}
    assert keys and keys <= {name for rule in inputs.ROW for name in re.findall(r"\w+", rule.names)}
    for name in re.findall(r"\w+", inputs.ROW[2].names):
        assert FIELD.fullmatch(name), name


@pytest.mark.parametrize(
    ("rules", "name", "becomes"),
    [
        ("MODEL", "attention_dropout", "ignored"),
        ("MODEL", "router_jitter_noise", "ignored"),
        *(("MODEL", name, "noted") for name in FURTHER),
        ("MODEL", "rope_theta", "used"),
        ("MODEL", "quantization_config", "refused"),
        ("GENERATION", "repetition_penalty", "noted"),
        ("ADAPTERS", "lora_dropout", "ignored"),
        ("ADAPTERS", "eva_config", "ignored"),
        ("ADAPTERS", "use_dora", "refused"),
    ],
)
def test_a_field_becomes_what_the_page_says(inputs: ModuleType, rules: str, name: str, becomes: str) -> None:
    known = inputs.ARCHITECTURE if rules == "MODEL" else ()
    assert inputs.rule_of(name, getattr(inputs, rules), known).becomes == becomes
    assert f"| {becomes} |" in inputs.inputs_reference()
