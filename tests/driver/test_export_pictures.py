"""Checkpoints that read pictures: a run on text trains their text alone, and exports what they were but for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from corerl.checkpoint.reader import CheckpointSource
from corerl.config.schema import ClusterInfo, LoraConfig, ModelConfig, RunConfig
from corerl.driver.export import export
from corerl.models.config import hf_config
from corerl.models.files import meta_model
from corerl.models.lora import saved_settings, targets_in
from corerl.models.parts import size_of
from corerl.plan.models import require_adapters
from corerl.plugin.registry import Kind, load
from corerl.types import FloatArray, MemoryKind
from corerl_testing.harness import Setup
from tests.driver.adapted import logprobs_by, train_adapted
from tests.driver.saved import CRITIC, make_config
from tests.pictures import FAMILIES, PROCESSOR, of_pictures, tensors_in, write_pictures

LORA = LoraConfig(rank=4, alpha=7.0).settled({})
CAUSAL = ("qwen3_5", "gemma3", "gemma4")  # which transformers has as causal models too
BUFFER = "layer_scalar"  # of Gemma 4's layers, which no gradient trains
# Names and files of each family; adapters where files name weights as the model does, and where not.
CASES = [*((family, None) for family in FAMILIES), ("qwen3_5", LORA), ("mistral3", LORA)]


def trained(tmp_path: Path, family: str, lora: LoraConfig | None = None) -> Any:
    """The base directory, and a checkpoint of two steps on it."""
    base = write_pictures(family, tmp_path / family)
    model = {"path": str(base), "tokenizer": "characters:0123456789>s"}
    config = evolve(make_config(model=model), lora=lora, run=RunConfig())
    return base, train_adapted(tmp_path / f"run-{family}", config)


def logprobs_of(model: Any, samples: Any) -> FloatArray:
    return logprobs_by(lambda tokens: model(input_ids=tokens[None]).logits[0], samples)


def loaded(directory: Path, auto: Any) -> Any:
    """A model of transformers, to which no weight was missing or unknown."""
    model, info = auto.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def adapted(base: Path, adapters: Path, lora: LoraConfig) -> Any:
    """The base as transformers loads it, with what adapters in a directory of PEFT add to modules of their names."""
    model, held = loaded(base, AutoModelForImageTextToText), tensors_in(adapters)
    for name in (name for name in held if ".lora_A." in name):
        module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        module.weight.data += lora.scale * held[name.replace(".lora_A.", ".lora_B.")] @ held[name]
    return model


def elements_of_text(config: Any) -> int:
    """How many weights transformers' own text model of this config has, with its head."""
    with torch.device("meta"):
        text: Any = AutoModel.from_config(config.get_text_config())
    head = 0 if config.tie_word_embeddings else text.get_input_embeddings().weight.numel()
    return head + sum(param.numel() for param in text.parameters())


def assert_is_the_base_but_for_text(directory: Path, base: Path, lora: LoraConfig | None) -> None:
    """Every tensor has its name, those that text does not pass through their bytes, and all others have changed."""
    before, after = tensors_in(base), tensors_in(directory)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    wanted = {name for name in before if not of_pictures(name) and BUFFER not in name}
    if lora is not None:
        targets = targets_in(meta_model(hf_config(ModelConfig(path=str(base)))), lora)
        ends = {name.rpartition("layers.")[2] for name in targets}
        wanted = {name for name in wanted if name.removesuffix(".weight").rpartition("layers.")[2] in ends}
    assert changed == wanted
    was, now = (json.loads((each / "config.json").read_text()) for each in (base, directory))
    assert (now["architectures"], now["model_type"]) == (was["architectures"], was["model_type"])
    assert now["vision_config"] == was["vision_config"]
    for name in PROCESSOR:
        assert (directory / name).read_text() == (base / name).read_text()


@pytest.mark.parametrize(("family", "lora"), CASES)
def test_a_run_on_text_keeps_what_reads_pictures(tmp_path: Path, family: str, lora: LoraConfig | None) -> None:
    base, run = trained(tmp_path, family, lora)
    assert np.abs(run.after - run.before).max() > 0.01
    unread = set(filter(of_pictures, tensors_in(base)))
    text = tensors_in(base).keys() - unread
    assert text == set(run.sent)
    saved = CheckpointSource(run.checkpoint / "actor", "master", "exp_avg", "exp_avg_sq", "buffer").shapes
    assert unread.isdisjoint(saved)
    # The memory is that of transformers' own text model.
    hf, spec = hf_config(ModelConfig(path=str(base))), load(Kind.BACKENDS, "plain").spec
    size = size_of(meta_model(hf, lora=lora))
    assert size.total == elements_of_text(hf)
    train = Setup(backend="plain", model="").train
    cluster = ClusterInfo(device="cpu", ranks=1, model=hf.to_dict(), train=train, lora=lora)
    predicted = spec.memory(spec.config(), cluster, size).kinds
    for kind, each in predicted.items():
        if kind is not MemoryKind.GRAD or run.held[kind]:  # gradients may be dropped after a step
            assert run.held[kind] == pytest.approx(each, rel=0.02)
    directory = export(run.checkpoint, tmp_path / "export", merge=None if lora is None else True)
    assert_is_the_base_but_for_text(directory, base, lora)
    for auto in [AutoModelForImageTextToText, *([AutoModelForCausalLM] if family in CAUSAL else [])]:
        assert np.abs(logprobs_of(loaded(directory, auto), run.samples) - run.after).max() < 1e-5
    if lora is not None:
        model = adapted(base, export(run.checkpoint, tmp_path / "adapters"), lora)
        assert np.abs(logprobs_of(model, run.samples) - run.after).max() < 1e-5


def test_a_run_goes_on_with_exported_adapters_of_renamed_weights(tmp_path: Path) -> None:
    base, first = trained(tmp_path, "mistral3", LORA)
    adapters = export(first.checkpoint, tmp_path / "adapters")
    lora = LoraConfig(path=str(adapters)).settled(saved_settings(adapters))
    hf = hf_config(ModelConfig(path=str(base)))
    require_adapters(adapters, meta_model(hf, lora=lora))
    _, second = trained(tmp_path, "mistral3", lora)
    assert np.array_equal(second.before, first.after)


def test_a_critic_is_exported_beside_the_tower(tmp_path: Path) -> None:
    base = write_pictures("gemma3", tmp_path / "base")
    model = {"path": str(base), "tokenizer": "characters:0123456789>s"}
    run = train_adapted(tmp_path / "run", make_config(model=model, **CRITIC), role="critic")
    assert np.abs(run.after - run.before).max() > 0.01
    before, after = tensors_in(base), tensors_in(export(run.checkpoint, tmp_path / "export", role="critic"))
    assert after.keys() == before.keys() | {"value_head.weight"}
    assert {name for name in before if torch.equal(before[name], after[name])} == set(filter(of_pictures, before))
