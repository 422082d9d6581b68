"""A model's directory may come with Python files; none of the loaders imports one, whoever answers yes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from corerl.config.schema import ModelConfig
from corerl.driver.export import export_directory
from corerl.engines.base import EngineContext
from corerl.errors import ModelError
from corerl.models.build import build_on_meta
from corerl.models.config import hf_config
from corerl.models.files import meta_model
from corerl.models.tokenizer import character_tokenizer, end_tokens, load_tokenizer
from corerl.plan.models import require_weights
from corerl_testing.models import tiny_fields
from corerl_transformers.engine import TransformersEngine
from corerl_transformers.spec import TransformersConfig

POISON = "import pathlib\n\npathlib.Path({mark!r}).touch()\n"
CLASSES = """
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


class Config(Qwen3Config):
    pass


class Model(Qwen3ForCausalLM):
    pass


class Tokenizer(PreTrainedTokenizerFast):
    pass


def generate(model, *arguments, **options):
    return None
"""
AUTO_MAP = {
    "AutoConfig": "poison.Config",
    "AutoModel": "poison.Model",
    "AutoModelForCausalLM": "poison.Model",
    "AutoTokenizer": ["poison.Tokenizer", "poison.Tokenizer"],
}


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that is there once code of the directory has run."""
    return tmp_path / "it-ran"


@pytest.fixture
def poisoned(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose every file asks for the code beside it; questions are answered with yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = tmp_path / "model"
    AutoModelForCausalLM.from_config(hf_config(tiny())).save_pretrained(directory)
    character_tokenizer("abc").save_pretrained(directory)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        file = directory / name
        fields = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**fields, "auto_map": AUTO_MAP, "custom_generate": str(directory)}))
    (directory / "custom_generate").mkdir()
    for file in (directory / "poison.py", directory / "custom_generate/generate.py"):
        file.write_text(POISON.format(mark=str(mark)) + CLASSES)
    return directory


def tiny() -> ModelConfig:
    return ModelConfig(config=tiny_fields("qwen3"))


def engine(directory: Path) -> TransformersEngine:
    context = EngineContext(
        name="engine-0", index=0, device="cpu", precision="float32", context_length=0, bundles=1, devices=(), run_dir=""
    )
    return TransformersEngine(ModelConfig(path=str(directory)), TransformersConfig(), context)


def config_of(directory: Path) -> PreTrainedConfig:
    return hf_config(ModelConfig(path=str(directory)))


LOADERS: dict[str, Callable[[Path], object]] = {
    "config": config_of,
    "tokenizer": lambda directory: load_tokenizer(tokenizer="", path=str(directory)),
    "model": lambda directory: build_on_meta(config_of(directory), dtype=torch.float32, attention="eager"),
    "files": lambda directory: require_weights(str(directory), meta_model(config_of(directory)), config_of(directory)),
    "generation config": lambda directory: end_tokens(character_tokenizer("abc"), ModelConfig(path=str(directory))),
    "engine": lambda directory: engine(directory).close(),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_no_loader_imports_code_of_a_model(loader: str, poisoned: Path, mark: Path) -> None:
    LOADERS[loader](poisoned)
    assert not mark.exists()


@pytest.mark.parametrize("loader", [AutoConfig, AutoTokenizer])
def test_it_does_run_for_who_trusts_it(loader: Any, poisoned: Path, mark: Path) -> None:
    loader.from_pretrained(poisoned, trust_remote_code=True)
    assert mark.exists()


def test_a_model_type_that_needs_code_is_refused(poisoned: Path, mark: Path) -> None:
    file = poisoned / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "poison"}))
    with pytest.raises(ModelError, match="model_type 'poison' is unknown to transformers") as caught:
        config_of(poisoned)
    assert caught.value.message.endswith("; the code that its auto_map names is never run")
    assert "\n" not in caught.value.message and not mark.exists()


def test_an_export_names_no_code(poisoned: Path, tmp_path: Path, mark: Path) -> None:
    config, tokenizer = config_of(poisoned), load_tokenizer(tokenizer="", path=str(poisoned))
    export_directory(tmp_path / "hf", config=config, tokenizer=tokenizer, tensors=[("a", torch.zeros(2))])
    written = [json.loads((tmp_path / "hf" / name).read_text()) for name in ("config.json", "tokenizer_config.json")]
    assert [each.get("auto_map") for each in written] == [None, None] and not mark.exists()
