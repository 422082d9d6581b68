"""A checkpoint that reads pictures is exported as what it was but for its text, whole, as adapters, and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from corerl.config.schema import LoraConfig, ModelConfig, RunConfig
from corerl.driver.export import export
from corerl.models.config import hf_config
from corerl.models.files import kept_digest, meta_model
from corerl.models.lora import saved_settings
from corerl.plan.models import require_adapters
from corerl.types import FloatArray
from tests.checkpoint.changes import rewrite
from tests.driver.adapted import logprobs_by, train_adapted
from tests.driver.saved import CRITIC, make_config
from tests.pictures import FAMILIES, PROCESSOR, of_pictures, tensors_in, write_pictures

LORA = LoraConfig(rank=3, alpha=7.0).settled({})


def trained(tmp_path: Path, family: str, lora: LoraConfig | None = None, **tables: Any) -> Any:
    """The base directory, and a checkpoint of two steps on it."""
    base = write_pictures(family, tmp_path / family)
    model = {"path": str(base), "tokenizer": "characters:0123456789>s"}
    config = evolve(make_config(model=model, **tables), lora=lora, run=RunConfig())
    return base, train_adapted(tmp_path / f"run-{family}", config)


def logprobs_of(model: Any, samples: Any) -> FloatArray:
    return logprobs_by(lambda tokens: model(input_ids=tokens[None]).logits[0], samples)


def loaded(directory: Path, auto: Any) -> Any:
    """A model of transformers, to which no weight was missing or unknown."""
    model, told = auto.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    return model.eval()


def assert_is_the_base_but_for_text(directory: Path, base: Path) -> None:
    """Every tensor has its name, those of pictures their bytes, and all others have changed."""
    before, after = tensors_in(base), tensors_in(directory)
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if of_pictures(name)}
    was, now = (json.loads((each / "config.json").read_text()) for each in (base, directory))
    assert (now["architectures"], now["model_type"]) == (was["architectures"], was["model_type"])
    assert now["vision_config"] == was["vision_config"]
    for name in PROCESSOR:
        assert (directory / name).read_text() == (base / name).read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_the_checkpoint_but_for_its_text(tmp_path: Path, family: str) -> None:
    base, run = trained(tmp_path, family)
    directory = export(run.checkpoint, tmp_path / "export")
    assert_is_the_base_but_for_text(directory, base)
    for auto in [AutoModelForImageTextToText, *([AutoModelForCausalLM] if family in ("qwen3_5", "gemma3") else [])]:
        assert np.abs(logprobs_of(loaded(directory, auto), run.samples) - run.after).max() < 1e-5
    assert np.abs(run.after - run.before).max() > 0.01


def test_a_run_goes_on_with_exported_adapters_of_renamed_weights(tmp_path: Path) -> None:
    base, first = trained(tmp_path, "mistral3", LORA)
    adapters = export(first.checkpoint, tmp_path / "adapters")
    lora = LoraConfig(path=str(adapters)).settled(saved_settings(adapters))
    hf = hf_config(ModelConfig(path=str(base)))
    require_adapters(adapters, meta_model(hf, lora=lora))
    _, second = trained(tmp_path, "mistral3", lora)
    assert np.array_equal(second.before, first.after)


@pytest.mark.parametrize("family", ["qwen3_5", "mistral3"])  # whose files name weights as the model does, and do not
def test_merged_adapters_are_the_whole_checkpoint(tmp_path: Path, family: str) -> None:
    base, run = trained(tmp_path, family, LORA)
    directory = export(run.checkpoint, tmp_path / "merged", merge=True)
    before, after = tensors_in(base), tensors_in(directory)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    adapted = {name for name in before if name.endswith("proj.weight") and "layers" in name and not of_pictures(name)}
    assert changed == adapted | {name for name in before if ".linear_attn.in_proj" in name}
    model = loaded(directory, AutoModelForImageTextToText)
    assert np.abs(logprobs_of(model, run.samples) - run.after).max() < 1e-5


def test_an_export_says_that_the_tower_was_replaced(tmp_path: Path) -> None:
    base, run = trained(tmp_path, "gemma3")
    kept = kept_digest(base, hf_config(ModelConfig(path=str(base))))
    rewrite(run.checkpoint, lambda content: content["state"].update(kept={"actor": kept}))
    tensors, said = tensors_in(base), list[str]()

    def exported(**changed: torch.Tensor) -> int:
        """The notices so far, after an export with some tensors of the directory replaced."""
        save_file({**tensors, **changed}, base / "model.safetensors", metadata={"format": "pt"})
        export(run.checkpoint, tmp_path / "export", replace=True, notify=said.append)
        return len(said)

    text, tower = (next(n for n in tensors if of_pictures(n) == each and "proj" in n) for each in (False, True))
    assert exported() == 0
    assert exported(**{text: tensors[text] + 1}) == 0  # which the checkpoint has
    assert exported(**{tower: tensors[tower] + 1}) == 1
    file = base / "config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, "vision_config": {**written["vision_config"], "layer_norm_eps": 0.5}}))
    assert exported() == 2
    line = (
        f"{base} has other weights or settings for pictures than as the actor was trained, and the export gets these; "
        "give back the directory that the run began with, and export again"
    )
    assert said == [line] * 2


def test_a_critic_is_exported_beside_the_tower(tmp_path: Path) -> None:
    base = write_pictures("gemma3", tmp_path / "base")
    model = {"path": str(base), "tokenizer": "characters:0123456789>s"}
    run = train_adapted(tmp_path / "run", make_config(model=model, **CRITIC), role="critic")
    assert np.abs(run.after - run.before).max() > 0.01
    before, after = tensors_in(base), tensors_in(export(run.checkpoint, tmp_path / "export", role="critic"))
    assert after.keys() == before.keys() | {"value_head.weight"}
    assert {name for name in before if torch.equal(before[name], after[name])} == set(filter(of_pictures, before))
