from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from corerl.config import ModelConfig
from corerl.errors import ModelError
from corerl.models.build import (
    build_on_meta,
    build_tower,
    materialize,
    move_buffers,
    named_weights,
    recompute_layers,
    stored_buffers,
)
from corerl.models.config import hf_config
from corerl.models.layouts import own_attention
from corerl_testing import smallest_config
from corerl_testing.models import KINDS, tiny_config
from tests.pictures import FAMILIES, of_pictures, pictures_config


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_on_meta_and_buffers_are_those_of_transformers(kind: str) -> None:
    model = build_on_meta(tiny_config(kind), dtype=torch.bfloat16, attention="sdpa")
    wanted = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.bfloat16)
    assert {name: (p.shape, p.dtype, p.is_meta) for name, p in model.named_parameters()} == {
        name: (p.shape, torch.bfloat16, True) for name, p in wanted.named_parameters()
    }
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(wanted.named_buffers()).keys()
    for name, buffer in wanted.named_buffers():
        assert torch.equal(buffers[name], buffer) and buffers[name].dtype == buffer.dtype


DBRX_ATTENTION = {"attn_pdrop": 0.1, "rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}
DBRX_FFN = {"moe_jitter_eps": 0.3, "ffn_hidden_size": 96, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("phi", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1}),
        ("opt", {"dropout": 0.1, "attention_dropout": 0.1, "layerdrop": 0.5, "ffn_dim": 96, "word_embed_proj_dim": 64}),
        ("mixtral", {"router_jitter_noise": 0.3, "num_local_experts": 4, "num_key_value_heads": 2}),
        ("dbrx", {"d_model": 64, "n_heads": 4, "attn_config": DBRX_ATTENTION, "ffn_config": DBRX_FFN}),
    ],
)
def test_a_model_in_training_draws_nothing(kind: str, fields: dict[str, Any]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, **sizes, vocab_size=97, **fields)
    before = config.to_dict()
    model = build_on_meta(config, dtype=torch.float32, attention="sdpa")
    torch.manual_seed(0)
    materialize(model, {name: nn.Parameter(torch.randn(p.shape) * 0.1) for name, p in model.named_parameters()})
    tokens = torch.arange(20)[None]
    trained, evaluated = model.train()(tokens).logits, model.eval()(tokens).logits
    assert torch.equal(trained, evaluated)
    assert config.to_dict() == before


def test_parameters_that_do_not_fit_are_refused() -> None:
    model = build_on_meta(tiny_config("qwen3"), dtype=torch.float32, attention="sdpa")
    new = {name: nn.Parameter(torch.zeros(p.shape)) for name, p in model.named_parameters()}
    with pytest.raises(ModelError, match="missing .*'model.norm.weight'"):
        materialize(model, {name: p for name, p in new.items() if name != "model.norm.weight"})
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \[3\], the model needs \[64\]"):
        materialize(model, {**new, "model.norm.weight": nn.Parameter(torch.zeros(3))})
    assert all(p.is_meta for p in model.parameters())


def test_stored_buffers_are_those_that_transformers_saves() -> None:
    config = tiny_config("glm4-moe")
    model = build_on_meta(config, dtype=torch.bfloat16, attention="sdpa")
    saved = AutoModelForCausalLM.from_config(config).state_dict().keys() - dict(model.named_parameters()).keys()
    stored = stored_buffers(model)
    assert stored.keys() == saved == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    assert {buffer.dtype for buffer in stored.values()} == {torch.float32}
    assert list(named_weights(model)) == [*dict(model.named_parameters()), *stored]


def test_a_model_that_stores_whole_numbers_in_buffers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3ForCausalLM

    built = Qwen3ForCausalLM.__init__

    def with_buffer(self: Qwen3ForCausalLM, config: Any) -> None:
        built(self, config)
        self.register_buffer("table", torch.zeros(3, dtype=torch.int64))

    monkeypatch.setattr(Qwen3ForCausalLM, "__init__", with_buffer)
    with pytest.raises(ModelError, match="stores torch.int64 values in the buffer 'table'"):
        build_on_meta(tiny_config("qwen3"), dtype=torch.float32, attention="sdpa")


def test_buffers_move_and_parameters_stay() -> None:
    model = build_on_meta(tiny_config("qwen3"), dtype=torch.float32, attention="sdpa")
    kept = set(model.state_dict())
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    move_buffers(model, torch.device("meta"))
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    assert set(model.state_dict()) == kept  # what no checkpoint holds, none holds afterwards


@pytest.mark.parametrize("model_type", ["qwen3", "gpt2", "bert"])  # bert's layers are not the decoder's own ModuleList
def test_recomputed_layers_give_the_same_gradients_and_keep_fewer_activations(model_type: str) -> None:
    def step(model: Any) -> tuple[dict[str, torch.Tensor], int]:
        kept = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = model(torch.arange(24)[None], use_cache=False).logits.square().sum()
        loss.backward()
        return {name: param.grad for name, param in model.named_parameters()}, kept

    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(smallest_config(model_type)).eval()
    other = copy.deepcopy(plain)
    recompute_layers(other)
    (wanted, all_kept), (found, few_kept) = step(plain), step(other)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=0, atol=0)
    assert few_kept < all_kept * 0.8


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_pictures_is_built_without_its_tower(family: str) -> None:
    config = pictures_config(family)
    config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[family]]
    whole: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    own = dict(whole.named_parameters())
    text = build_on_meta(config, dtype=torch.float32, attention="eager")
    assert type(text) is type(whole)
    build_on_meta(config, dtype=torch.float32, attention=own_attention(config))  # which not all its parts have
    assert dict(text.named_parameters()).keys() == {name for name in own if not of_pictures(name)}
    materialize(text, {name: nn.Parameter(own[name].detach()) for name, _ in text.named_parameters()})
    tokens = torch.tensor([[9, 10, 11, 30, 40]])
    with torch.no_grad():
        assert torch.equal(text.eval()(input_ids=tokens).logits, whole.eval()(input_ids=tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_has_all_weights_but_the_texts(family: str, tmp_path: Path) -> None:
    pictures_config(family).save_pretrained(tmp_path)
    config = hf_config(ModelConfig(path=str(tmp_path), pictures="vision"))
    whole = AutoModelForImageTextToText.from_config(config)
    text = {id(param) for part in (whole.get_decoder(), whole.get_output_embeddings()) for param in part.parameters()}
    wanted = {name: param.shape for name, param in whole.named_parameters() if id(param) not in text}
    tower = build_tower(config, dtype=torch.float32)
    assert {name: param.shape for name, param in tower.named_parameters()} == wanted
