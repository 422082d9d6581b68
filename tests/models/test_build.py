from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from corerl.errors import ModelError
from corerl.models.build import (
    build_on_meta,
    materialize,
    recompute_layers,
)
from corerl_testing import smallest_config
from corerl_testing.models import tiny_config


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("phi", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1}),
        ("opt", {"dropout": 0.1, "attention_dropout": 0.1, "layerdrop": 0.5, "ffn_dim": 96, "word_embed_proj_dim": 64}),
        ("mixtral", {"router_jitter_noise": 0.3, "num_local_experts": 4, "num_key_value_heads": 2}),
    ],
)
def test_a_model_draws_nothing_while_it_trains_whatever_its_config_says(kind: str, fields: dict[str, Any]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, **sizes, vocab_size=97, **fields)
    model = build_on_meta(config, dtype=torch.float32, attention="sdpa")
    torch.manual_seed(0)
    materialize(model, {name: nn.Parameter(torch.randn(p.shape) * 0.1) for name, p in model.named_parameters()})
    tokens = torch.arange(20)[None]
    trained, evaluated = model.train()(tokens).logits, model.eval()(tokens).logits
    assert torch.equal(trained, evaluated)
    assert {name: getattr(config, name) for name in fields} == fields


def test_parameters_that_do_not_fit_are_refused() -> None:
    model = build_on_meta(tiny_config("qwen3"), dtype=torch.float32, attention="sdpa")
    new = {name: nn.Parameter(torch.zeros(p.shape)) for name, p in model.named_parameters()}
    with pytest.raises(ModelError, match="missing .*'model.norm.weight'"):
        materialize(model, {name: p for name, p in new.items() if name != "model.norm.weight"})
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \[3\], the model needs \[64\]"):
        materialize(model, {**new, "model.norm.weight": nn.Parameter(torch.zeros(3))})
    assert all(p.is_meta for p in model.parameters())


def test_a_model_that_stores_whole_numbers_in_buffers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3ForCausalLM

    built = Qwen3ForCausalLM.__init__

    def with_buffer(self: Qwen3ForCausalLM, config: object) -> None:
        built(self, config)
        self.register_buffer("table", torch.zeros(3, dtype=torch.int64))

    monkeypatch.setattr(Qwen3ForCausalLM, "__init__", with_buffer)
    with pytest.raises(ModelError, match="stores torch.int64 values in the buffer 'table'"):
        build_on_meta(tiny_config("qwen3"), dtype=torch.float32, attention="sdpa")


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
