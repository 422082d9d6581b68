"""A role's adapters leave a checkpoint alone, as PEFT reads them, or merged into the weights that they were trained
beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from corerl.checkpoint.reader import CheckpointSource
from corerl.config.schema import Config, LoraConfig, RunConfig
from corerl.driver.export import _export_adapters, export
from corerl.errors import ModelError
from corerl.models.config import hf_config
from corerl.models.files import meta_model
from corerl.models.lora import targets_in
from corerl.types import FloatArray, SampleBatch
from corerl.weights.adapters import adapters_of, is_adapter
from corerl_testing import smallest_config
from corerl_testing.models import drawn_model, tiny_fields
from corerl_testing.tolerances import LOGPROBS
from tests.driver.adapted import Adapted, logprobs_by, tokens_of, train_adapted
from tests.driver.saved import CRITIC, DATA, make_config, make_model
from tests.with_peft import needs_peft, run_with_peft

LORA = LoraConfig(rank=3, alpha=7.0, rslora=True).settled({})
PLACED = evolve(LORA, targets=("layers.1.mlp.up_proj", "self_attn.q_proj"))  # no last name means these alone
READ = """
from peft import PeftModel
from transformers import AutoModelForCausalLM

found = []
for case in asked:
    base = AutoModelForCausalLM.from_pretrained(case["base"], dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, case["adapters"]).eval() if case["adapters"] else base
    logprobs = []
    with torch.no_grad():
        for tokens in case["tokens"]:
            log_p = (model(input_ids=tokens[None]).logits[0, :-1] / case["temperature"]).log_softmax(-1)
            logprobs.append(log_p.gather(-1, tokens[1:, None])[:, 0])
    found.append(logprobs)
"""


def adapting(base: Path | None = None, lora: LoraConfig = LORA, seed: int = 0, **tables: Any) -> Config:
    """Of a model in files or, without `base`, of random weights."""
    if base is not None:
        tables["model"] = {**DATA["model"], "path": str(base), "config": {}}
    return evolve(make_config(**tables), lora=lora, run=RunConfig(seed=seed))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    make_model(make_config(), seed=1).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def of_base(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return train_adapted(tmp_path_factory.mktemp("run"), adapting(base))


@pytest.fixture(scope="module")
def of_random(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return train_adapted(tmp_path_factory.mktemp("run"), adapting(seed=5))


def logprobs_of(directory: Path, samples: SampleBatch) -> FloatArray:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    return logprobs_by(lambda tokens: model(tokens[None]).logits[0], samples)


def apart(one: Any, other: Any) -> float:
    return float(np.abs(one - other).max())


@needs_peft
@pytest.mark.processes
def test_peft_loads_exported_adapters_and_gives_the_trained_log_probs(
    base: Path, of_base: Adapted, tmp_path: Path
) -> None:
    drawn_model(hf_config(adapting(moe(tmp_path)).model)).save_pretrained(tmp_path / "experts")
    trained = {
        "all": (base, of_base),
        "placed": (base, train_adapted(tmp_path / "placed-run", adapting(base, PLACED))),
        "moe": (tmp_path / "experts", train_adapted(tmp_path / "moe-run", adapting(tmp_path / "experts"))),
    }
    asked = []
    for name, (weights, adapted) in trained.items():
        told: list[str] = []
        directory = export(adapted.checkpoint, tmp_path / name, notify=told.append)
        assert told == []  # a directory has the weights that they belong to
        assert sorted(file.name for file in directory.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        case = {"base": str(weights), "temperature": adapted.samples.temperature, "tokens": tokens_of(adapted.samples)}
        asked.append({**case, "adapters": str(directory)})
    found = run_with_peft(READ, asked, tmp_path)
    for (_, adapted), logprobs in zip(trained.values(), found, strict=True):
        theirs = np.concatenate([each for own in logprobs for each in (np.zeros(1), own.numpy())])
        assert apart(adapted.after, adapted.before) > 0.01
        assert apart(adapted.after, theirs) < LOGPROBS.absolute


def moe(directory: Path) -> Path:
    """The config of a model of experts."""
    hf_config(evolve(make_config().model, config={**tiny_fields("qwen3-moe"), "vocab_size": 16})).save_pretrained(
        directory / "config"
    )
    return directory / "config"


def test_adapters_have_whole_names_where_short_ones_are_ambiguous(tmp_path: Path) -> None:
    config = smallest_config("zamba2")  # adapters of its own are the modules 0 and 1 of a list, as layers are
    layers = targets_in(meta_model(config), LORA)
    assert any(name.endswith(".0") for name in layers)
    tensors = {
        name: torch.zeros(shape)
        for target, layer in layers.items()
        for name, shape in zip(
            adapters_of(f"{target}.weight"), [(3, layer.in_features), (layer.out_features, 3)], strict=True
        )
    }
    _export_adapters(tmp_path, config, LORA, iter(tensors.items()), base="zamba2")
    told = json.loads((tmp_path / "adapter_config.json").read_text())
    assert told["target_modules"] == sorted(layers)


@pytest.mark.parametrize("of", ["of_base", "of_random"])
def test_a_merged_export_gives_the_trained_log_probs(of: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    adapted: Adapted = request.getfixturevalue(of)
    directory = export(adapted.checkpoint, tmp_path / "merged", merge=True)
    assert apart(adapted.after, logprobs_of(directory, adapted.samples)) < LOGPROBS.absolute
    assert not any(map(is_adapter, load_file(directory / "model.safetensors")))
    assert (directory / "tokenizer.json").exists()


def test_weights_rounded_for_training_are_merged_as_files_have_them(base: Path, tmp_path: Path) -> None:
    adapted = train_adapted(tmp_path / "run", adapting(base, train={"precision": "bfloat16"}), backend="fsdp")
    directory = export(adapted.checkpoint, tmp_path / "merged", merge=True, dtype="float32")
    found, weights = (load_file(each / "model.safetensors") for each in (directory, base))
    assert torch.equal(found["model.norm.weight"], weights["model.norm.weight"])
    assert not torch.equal(found["model.layers.0.mlp.up_proj.weight"], weights["model.layers.0.mlp.up_proj.weight"])


def test_a_model_that_has_changed_since_is_not_merged(of_base: Adapted, base: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    make_model(make_config(), seed=1).save_pretrained(copy)
    adapted = train_adapted(tmp_path / "run", adapting(copy))
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        export(adapted.checkpoint, tmp_path / "merged", merge=True)
    told = caught.value.message
    assert told.startswith("the weights that the adapters belong to have the digest ")
    assert told.endswith("; give back the model.path that they were trained with")
    assert not (tmp_path / "merged").exists() and not list(tmp_path.glob(".merged*"))
    export(adapted.checkpoint, tmp_path / "adapters")  # which need no weights


def test_a_critics_adapters_are_exported_merged_with_its_head(base: Path, tmp_path: Path) -> None:
    tables = {**CRITIC, "model": {**DATA["model"], "path": str(base), "config": {}}}
    config = make_config(**tables)
    own = evolve(config.roles.critic, lora=LORA)
    adapted = train_adapted(tmp_path / "run", evolve(config, roles=evolve(config.roles, critic=own)), role="critic")
    assert apart(adapted.after, adapted.before) > 0.01
    with pytest.raises(ModelError) as caught:
        export(adapted.checkpoint, tmp_path / "adapters", role="critic")
    assert caught.value.message == "PEFT has no place for the critic's value head; export it merged"
    directory = export(adapted.checkpoint, tmp_path / "merged", role="critic", merge=True)
    tensors = load_file(directory / "model.safetensors")
    held = CheckpointSource(adapted.checkpoint / "critic", "master")
    assert torch.equal(tensors["value_head.weight"], held.read("value_head.weight", (0, 0), (1, 32)))
    decoder = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True).model.eval()
    with torch.no_grad():
        hidden = [decoder(tokens[None]).last_hidden_state[0, :-1] for tokens in tokens_of(adapted.samples)]
    values = [(each @ tensors["value_head.weight"].T)[:, 0].numpy() for each in hidden]
    found = np.concatenate([each for own in values for each in (np.zeros(1), own)])
    assert apart(adapted.after, found) < LOGPROBS.absolute
