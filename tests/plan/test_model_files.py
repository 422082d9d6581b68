"""A checkpoint that lacks a tensor, or has it in another shape, is told before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from corerl.config.schema import ModelConfig
from corerl.errors import CheckpointError, ModelError
from corerl.models.config import hf_config
from corerl.plan.model_files import built, require_memory, require_same_model, require_weights
from tests.driver.saved import make_config, make_model, save


def test_a_checkpoint_must_hold_every_tensor_of_the_model_in_its_shape(tmp_path: Path) -> None:
    config = make_config()
    checkpoint = save(tmp_path, config, make_model(config, seed=1), step=2)
    fields = dict(config.model.config)

    def require(**changes: Any) -> None:
        changed = hf_config(evolve(config.model, config={**fields, **changes}))
        require_same_model(checkpoint, "actor", built(changed, value_head=False))

    require()
    with pytest.raises(CheckpointError, match=r"has \[16, 32\] for 'model.embed_tokens.weight'.* needs \[19, 32\]"):
        require(vocab_size=19)
    with pytest.raises(CheckpointError, match=r"lacks 'lm_head.weight', this run's actor needs \[16, 32\]"):
        require(tie_word_embeddings=False)


def test_a_checkpoint_must_hold_every_role(tmp_path: Path) -> None:
    config = make_config()
    checkpoint = save(tmp_path, config, make_model(config, seed=1), step=2)
    with pytest.raises(CheckpointError, match=r"step-00000002 has no critic, but this run does; resume with"):
        require_same_model(checkpoint, "critic", built(hf_config(config.model), value_head=True))


def test_what_the_files_have_besides_is_listed(tmp_path: Path) -> None:
    config = make_config()
    make_model(config, seed=1).save_pretrained(tmp_path)
    hf, file = hf_config(ModelConfig(path=str(tmp_path))), tmp_path / "model.safetensors"

    def told(role: str, **more: torch.Tensor) -> str:
        save_file({**tensors, **more}, file, metadata={"format": "pt"})
        return require_weights(str(tmp_path), built(hf, value_head=role == "critic"), hf)

    tensors = load_file(file)
    assert told("actor") == told("critic") == ""
    copy = tensors["model.embed_tokens.weight"].clone()
    assert told("actor", **{"value_head.weight": torch.zeros(1, 32), "lm_head.weight": copy}) == ""  # a critic's head
    tensors["score.weight"] = torch.zeros(2)
    what = f"{tmp_path} has a tensor that the model lacks, not used: score.weight"
    assert told("actor") == told("critic") == what
    many = {f"model.layers.{layer}.mlp.scale": torch.zeros(2) for layer in range(10, 22)}
    assert told("actor", **many) == (
        f"{tmp_path} has 13 tensors that the model lacks, not used: "
        + ", ".join(f"model.layers.{layer}.mlp.scale" for layer in range(10, 18))
        + ", and 5 more"
    )
    tensors["model.norm.weight"] = tensors["model.norm.weight"].view(torch.int32)
    with pytest.raises(
        ModelError, match=r"has values of type I32 for 'model.norm.weight', wanted one of F64, F32, BF16"
    ):
        told("actor")
    del tensors["model.norm.weight"]
    with pytest.raises(ModelError, match=r"model.safetensors lacks 'model.norm.weight', but its config.json needs"):
        told("critic")


def test_a_model_that_no_memory_holds_is_refused() -> None:
    fields = dict(make_config().model.config)
    model = built(hf_config(ModelConfig(config=fields)), value_head=False)
    count = sum(param.numel() for param in model.parameters())
    assert count == 16 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 8 + 2 * 32) + 32
    buffers = sum(buffer.numel() for buffer in model.buffers())
    require_memory(model, there=2 * (count + buffers))
    with pytest.raises(ModelError, match=r"parameters, which take .* GiB in 16 bits, and this machine has .* GiB"):
        require_memory(model, there=2 * (count + buffers) - 1)
    wide = built(hf_config(ModelConfig(config={**fields, "hidden_size": 10**9})), value_head=False)
    with pytest.raises(ModelError, match=r"the model has .*e\+1\d parameters.*'model.layers.0.mlp.gate_proj.weight', "):
        require_memory(wide, there=2**40)
