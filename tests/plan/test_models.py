"""What is said, or refused, of a model, its files and its experts before any process starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from corerl.config.schema import Config, LoraConfig, ModelConfig
from corerl.driver.export import write_adapters
from corerl.errors import CheckpointError, ModelError
from corerl.models.config import hf_config
from corerl.models.files import meta_model
from corerl.models.layouts import choose_layout
from corerl.models.names import shapes_of
from corerl.plan.check import Problems
from corerl.plan.models import (
    RoleModel,
    against_aux_loss,
    against_sharing,
    build_models,
    check_files,
    load_configs,
    require_adapters,
    require_memory,
    require_same_tensors,
    require_weights,
    saved_shapes,
    sight_of,
)
from corerl.plan.resolve import plugins_of
from corerl.weights.adapters import is_adapter
from corerl_testing import smallest_config
from corerl_testing.models import tiny_config
from tests.driver.adapted import train_adapted
from tests.driver.saved import config_in, make_config, make_model, save
from tests.pictures import pictures_config, tensors_in, write_pictures


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_in(tmp_path / "run")


def balancing(config: Config, coef: float = 0.25) -> Config:
    return evolve(config, train=evolve(config.train, aux_loss_coef=coef))


def model_of(config: Config, hf: PreTrainedConfig) -> RoleModel:
    """The actor's, with another model in the place of its own."""
    given = make_config()
    model = build_models(given, plugins_of(given), load_configs(given, ["actor"]))["actor"]
    return evolve(model, settings=config.model, train=config.train, lora=config.lora, hf=hf, built=meta_model(hf))


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("qwen3", "but the actor's model has no experts"),
        ("glm4_moe", "but transformers has no such loss for Glm4MoeForCausalLM"),
        ("jetmoe", "but it is not known which modules of JetMoeForCausalLM route"),
    ],
)
def test_models_that_cannot_be_balanced_are_refused(config: Config, model_type: str, said: str) -> None:
    hf = smallest_config(model_type)
    assert list(against_aux_loss(model_of(balancing(config), hf), streamed=False)) == [
        f"train.aux_loss_coef: 0.25, {said}; set it to 0"
    ]
    assert list(against_aux_loss(model_of(config, hf), streamed=False)) == []


@pytest.mark.parametrize(
    ("model_type", "layout", "said"),
    [
        ("qwen3", "auto", ""),
        ("gpt_oss", "auto", ""),
        ("qwen3", "whole", "but the actor's model passes padded rows"),
        ("mamba2", "auto", "but layers of the actor's model carry a state along a row, which branches cannot share"),
    ],
)
def test_models_whose_samples_cannot_share_prefixes_are_refused(
    config: Config, model_type: str, layout: str, said: str
) -> None:
    hf = smallest_config(model_type)
    model = model_of(evolve(config, train=evolve(config.train, share_prefixes=True)), hf)
    found = list(against_sharing(evolve(model, layout=choose_layout(model.built, layout))))
    assert found == ([f"train.share_prefixes: true, {said}; set it to false"] if said else [])
    assert list(against_sharing(model_of(config, hf))) == []


def test_a_step_whose_tokens_are_not_known_is_refused(config: Config) -> None:
    model = model_of(balancing(config), tiny_config("qwen3-moe"))
    assert list(against_aux_loss(model, streamed=False)) == []
    (line,) = against_aux_loss(model, streamed=True)
    assert "weighs tokens by how many the step has" in line and line.endswith("or rollout.source to 'synchronous'")


# ---- files -----------------------------------------------------------------------------------------------------------

LORA = LoraConfig(rank=3, alpha=7.0, targets=("q_proj", "up_proj")).settled({})


def test_a_checkpoint_holds_every_tensor_in_its_shape(tmp_path: Path) -> None:
    config = make_config()
    checkpoint = save(tmp_path, config, make_model(config, seed=1), step=2)
    fields = dict(config.model.config)

    def require(**changes: Any) -> None:
        changed = hf_config(evolve(config.model, config={**fields, **changes}))
        require_same_tensors(checkpoint / "actor", "actor", saved_shapes(changed, value_head=False, lora=None))

    require()
    with pytest.raises(CheckpointError, match=r"has \[16, 32\] for 'model.embed_tokens.weight'.* needs \[19, 32\]"):
        require(vocab_size=19)
    with pytest.raises(CheckpointError, match=r"lacks 'lm_head.weight', this run's actor needs \[16, 32\]"):
        require(tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"step-00000002 has no critic, but this run does; resume with"):
        require_same_tensors(checkpoint / "critic", "critic", {})


def test_checkpoints_of_adapters_and_of_all_weights_are_not_exchanged(tmp_path: Path) -> None:
    config = make_config()
    hf, whole = hf_config(config.model), save(tmp_path / "whole", config, make_model(config, seed=1), step=2)
    adapted = train_adapted(tmp_path / "adapted", evolve(config, lora=LORA)).checkpoint
    of_all, of_adapters = (saved_shapes(hf, value_head=False, lora=lora) for lora in (None, LORA))
    require_same_tensors(adapted / "actor", "actor", of_adapters)

    def told(checkpoint: Path, shapes: dict[str, tuple[int, ...]]) -> str:
        with pytest.raises(CheckpointError) as caught:
            require_same_tensors(checkpoint / "actor", "actor", shapes)
        return caught.value.message

    advice = "resume with the [lora] it was trained with, or start a new run from its export"
    assert told(whole, of_adapters) == f"{whole}/actor holds all weights, this run's actor trains adapters; {advice}"
    assert told(adapted, of_all) == f"{adapted}/actor holds adapters, this run's actor trains all weights; {advice}"
    other_rank = saved_shapes(hf, value_head=False, lora=evolve(LORA, rank=4))
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert told(adapted, other_rank).startswith(
        f"{adapted}/actor has [3, 32] for '{first}', this run's actor needs [4, 32]"
    )
    more = saved_shapes(hf, value_head=False, lora=evolve(LORA, targets=("q_proj", "up_proj", "v_proj")))
    assert "/actor lacks 'base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight'" in told(adapted, more)


def test_a_peft_directory_has_exactly_the_models_adapters(tmp_path: Path) -> None:
    model = meta_model(tiny_config("qwen3"), lora=LORA)
    tensors = {name: torch.randn(shape) for name, shape in shapes_of(model).items() if is_adapter(name)}
    file = tmp_path / "adapters/adapter_model.safetensors"

    def told(changes: dict[str, torch.Tensor | None]) -> str:
        kept = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
        write_adapters(tmp_path / "adapters", kept, {})
        with pytest.raises(ModelError) as caught:
            require_adapters(tmp_path / "adapters", model)
        return caught.value.message

    write_adapters(tmp_path / "adapters", tensors, {})
    require_adapters(tmp_path / "adapters", model)
    up = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    advice = "use adapters of the same model"
    assert told({up: None}) == f"{file} lacks {up!r}, this model needs [96, 3]; {advice}"
    assert told({up: torch.zeros(96, 4)}) == f"{file} has [96, 4] for {up!r}, this model needs [96, 3]; {advice}"
    assert told({up: torch.zeros(96, 3, dtype=torch.int8)}) == (
        f"{file} has values of type I8 for {up!r}, wanted one of F64, F32, BF16, F16; save the adapters again"
    )
    others = {
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(3, 97),
        "base_model.model.lm_head.weight": torch.zeros(97, 64),
    }
    assert told(dict(others)) == (
        f"{tmp_path}/adapters has tensors that no adapter of this model is, as base_model.model.lm_head.weight, "
        "base_model.model.model.embed_tokens.lora_embedding_A; use adapters of linear layers of the same model"
    )
    with pytest.raises(ModelError, match="^'/nowhere' is not a directory, expected a directory of PEFT"):
        require_adapters(Path("/nowhere"), model)


def test_files_in_whole_numbers_or_without_a_tensor_are_refused(tmp_path: Path) -> None:
    config = make_config()
    make_model(config, seed=1).save_pretrained(tmp_path)
    hf, file = hf_config(ModelConfig(path=str(tmp_path))), tmp_path / "model.safetensors"
    tensors = load_file(file)

    def require(role: str, **more: torch.Tensor) -> None:
        save_file({**tensors, **more}, file, metadata={"format": "pt"})
        require_weights(str(tmp_path), meta_model(hf, value_head=role == "critic"), hf)

    require("actor")
    require("critic")
    require("actor", **{"value_head.weight": torch.zeros(1, 32)})  # a critic's head
    tensors["model.norm.weight"] = tensors["model.norm.weight"].view(torch.int32)
    with pytest.raises(
        ModelError, match=r"has values of type I32 for 'model.norm.weight', wanted one of F64, F32, BF16"
    ):
        require("actor")
    del tensors["model.norm.weight"]
    with pytest.raises(ModelError, match=r"model.safetensors lacks 'model.norm.weight', but its config.json needs"):
        require("critic")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device adds its memory")
def test_a_model_that_no_memory_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = dict(make_config().model.config)
    model = meta_model(hf_config(ModelConfig(config=fields)), value_head=False)
    count = sum(param.numel() for param in model.parameters())
    assert count == 16 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 8 + 2 * 32) + 32
    buffers = sum(buffer.numel() for buffer in model.buffers())
    monkeypatch.setattr("os.sysconf", lambda name: 1 if name == "SC_PAGE_SIZE" else there)
    there = 2 * (count + buffers)
    require_memory(model)
    there -= 1
    with pytest.raises(ModelError, match=r"parameters, which take .* GiB in 16 bits, and this machine has .* GiB"):
        require_memory(model)
    there = 2**40
    wide = meta_model(hf_config(ModelConfig(config={**fields, "hidden_size": 10**9})), value_head=False)
    with pytest.raises(ModelError, match=r"the model has .*e\+1\d parameters.*'model.layers.0.mlp.gate_proj.weight', "):
        require_memory(wide)


def checked(directory: Path, **settings: Any) -> None:
    """Check the files of a model that reads pictures."""
    hf, problems = hf_config(ModelConfig(path=str(directory))), Problems()
    given = {"table": "model", "frozen": False, "lora": None, "hf": hf, "built": meta_model(hf)}
    role: Any = SimpleNamespace(settings=ModelConfig(path=str(directory), **settings), **given)
    check_files(role, None, setting="", refers=False, problems=problems)
    problems.raise_all()


def test_files_without_a_whole_tower_are_refused_with_pictures(tmp_path: Path) -> None:
    directory = write_pictures("qwen3_vl", tmp_path)
    tensors = tensors_in(directory)
    gone = next(name for name in tensors if "visual" in name)
    del tensors[gone]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    checked(directory)
    for tower in ("frozen", "trained"):
        with pytest.raises(ModelError, match=f"^model.path: .* lacks '{gone}', but its config.json needs"):
            checked(directory, pictures="vision", tower=tower)


def test_models_of_one_family_have_the_same_tokens_for_pictures() -> None:
    qwen, gemma = pictures_config("qwen3_vl"), pictures_config("gemma3")
    assert sight_of(qwen) == sight_of(pictures_config("qwen3_vl"))
    assert sight_of(qwen) != sight_of(gemma)
    coarser = pictures_config("qwen3_vl")
    coarser.vision_config.patch_size = 8
    assert sight_of(coarser) != sight_of(qwen)
