from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from corerl.config.schema import ModelConfig
from corerl.errors import ModelError
from corerl.models.config import hf_config
from corerl.models.files import ModelFiles, meta_model, model_files, untied_head
from corerl.models.names import hf_boxes
from corerl.models.readers import SINGLE
from corerl_testing.models import tiny_fields

Load = Callable[[Path, str], PreTrainedModel]
GPT2 = {"model_type": "gpt2", "vocab_size": 31, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
MODELS = {"gpt2": GPT2, **{kind: tiny_fields(kind) for kind in ("qwen3", "qwen3-tied", "qwen3-moe")}}


def written(directory: Path, fields: dict[str, Any], rename: Callable[[str], str] = lambda name: name) -> Path:
    """A model of `fields` with its tensors renamed."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(directory)
    change(directory, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    return directory


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(edit(load_file(directory / SINGLE)), directory / SINGLE, metadata={"format": "pt"})


def assert_loads_as_in_transformers(directory: Path, load: Load) -> PreTrainedModel:
    found = load(directory, "eager").state_dict()
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    wanted, told = from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not told["missing_keys"] and found.keys() == wanted.state_dict().keys()
    assert [name for name, tensor in wanted.state_dict().items() if not torch.equal(found[name], tensor)] == []
    assert unused(directory) == sorted(told["unexpected_keys"])
    return wanted


def unused(directory: Path) -> list[str]:
    config = hf_config(ModelConfig(path=str(directory)))
    model = meta_model(config)
    names = [box.name for boxes in hf_boxes(model).values() for box in boxes]
    return ModelFiles(directory, config).unused(names, model)


def test_models_of_equal_configs_are_looked_at_once_and_no_others() -> None:
    fields = tiny_fields("qwen3")
    model, again = (meta_model(AutoConfig.for_model(**fields)) for _ in range(2))
    assert again is model
    wider = meta_model(AutoConfig.for_model(**{**fields, "vocab_size": 101}))
    assert [len(each.get_input_embeddings().weight) for each in (wider, model)] == [101, 97]
    critic = meta_model(AutoConfig.for_model(**fields), value_head=True)
    assert hasattr(critic, "value_head") and not hasattr(model, "value_head")


@pytest.mark.parametrize("prefixed", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_names_with_and_without_the_prefix_are_those_of_transformers(
    kind: str, prefixed: bool, tmp_path: Path, load: Load
) -> None:
    prefix = "transformer." if kind == "gpt2" else "model."
    directory = written(tmp_path, MODELS[kind], lambda name: prefix * prefixed + name.removeprefix(prefix))
    assert any(name.startswith(prefix) for name in load_file(directory / SINGLE)) == prefixed
    assert_loads_as_in_transformers(directory, load)


def test_what_no_model_has_is_told_but_for_the_buffers_of_older_versions(tmp_path: Path, load: Load) -> None:
    directory = written(tmp_path, GPT2)
    more = {"h.0.attn.bias": torch.ones(1, 1, 48, 48), "score.weight": torch.ones(2)}
    change(directory, lambda tensors: {**tensors, **more})
    assert_loads_as_in_transformers(directory, load)
    assert unused(directory) == ["score.weight"]


@pytest.mark.parametrize(
    ("kind", "embedding"), [("gpt2", "transformer.wte.weight"), ("qwen3-tied", "model.embed_tokens.weight")]
)
@pytest.mark.parametrize("prefixed", [True, False])
def test_a_head_that_differs_from_the_embedding_is_used_whatever_the_config_says(
    kind: str, embedding: str, prefixed: bool, tmp_path: Path, load: Load
) -> None:
    directory = written(tmp_path, {**MODELS[kind], "tie_word_embeddings": True})
    head = torch.randn_like(load_file(directory / SINGLE)[embedding])
    change(directory, lambda tensors: {**tensors, "lm_head.weight": head})
    if not prefixed:
        prefix = "transformer." if kind == "gpt2" else "model."
        change(directory, lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
    wanted = assert_loads_as_in_transformers(directory, load)
    assert torch.equal(wanted.get_output_embeddings().weight, head)
    config = hf_config(ModelConfig(path=str(directory)))
    assert not config.tie_word_embeddings and json.loads((directory / "config.json").read_text())["tie_word_embeddings"]


def test_a_head_that_differs_in_its_last_row_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corerl.models.files.COMPARED", 64 * 10)  # ten rows at a time of 97
    directory = written(tmp_path, MODELS["qwen3-tied"])
    config = AutoConfig.from_pretrained(directory)
    head = load_file(directory / SINGLE)["model.embed_tokens.weight"].clone()
    change(directory, lambda tensors: {**tensors, "lm_head.weight": head})
    assert untied_head(config, directory) == "" and unused(directory) == []
    assert model_files(directory, config).shape("model.embed_tokens.weight") == (97, 64)
    head[96, 63] += 1
    change(directory, lambda tensors: {**tensors, "lm_head.weight": head})
    assert untied_head(config, directory) == "lm_head.weight"
    with pytest.raises(ModelError, match="has a lm_head.weight of its own, but in this run's model it is the same as"):
        model_files(directory, config)  # as a snapshot of a model that is tied


@pytest.mark.parametrize("kind", ["gpt2", "qwen3-tied"])
def test_a_tied_model_whose_files_have_the_head_alone_gets_its_embedding_from_it(
    kind: str, tmp_path: Path, load: Load
) -> None:
    embeddings = ("transformer.wte.weight", "model.embed_tokens.weight")
    directory = written(
        tmp_path,
        {**MODELS[kind], "tie_word_embeddings": True},
        lambda name: "lm_head.weight" if name in embeddings else name,
    )
    assert_loads_as_in_transformers(directory, load)


def test_a_model_that_is_not_tied_is_not_given_its_embedding_for_a_head(tmp_path: Path) -> None:
    directory = written(tmp_path, MODELS["qwen3"])
    change(directory, lambda tensors: {name: t for name, t in tensors.items() if name != "lm_head.weight"})
    assert ModelFiles(directory, hf_config(ModelConfig(path=str(directory)))).shape("lm_head.weight") is None
