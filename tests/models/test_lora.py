"""Which linear layers get adapters, what they compute, and what is trained then."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn
from transformers import PreTrainedModel

from corerl.config.schema import LoraConfig
from corerl.errors import ModelError
from corerl.models import names
from corerl.models.build import build_on_meta, materialize
from corerl.models.files import look_at
from corerl.models.lora import LoraLinear, adapter_parameters, freeze, put_adapters, targets_in, trained_parameters
from corerl.models.names import peft_names, shapes_of
from corerl.weights.adapters import PREFIX, B, adapted, is_adapter
from corerl_testing import smallest_config
from corerl_testing.models import drawn_model, tiny_config

LORA = LoraConfig(rank=3, alpha=7.0).settled({})
ATTENTION = [f"self_attn.{name}_proj" for name in ("k", "o", "q", "v")]
MLP = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]


def of(*targets: str) -> LoraConfig:
    return evolve(LORA, targets=targets)


def in_layers(*names: str) -> set[str]:
    return {f"model.layers.{layer}.{name}" for layer in range(2) for name in names}


@pytest.mark.parametrize(
    ("kind", "targets", "wanted"),
    [
        ("qwen3", ("all-linear",), in_layers(*ATTENTION, *MLP)),
        ("qwen3-tied", ("all-linear",), in_layers(*ATTENTION, *MLP)),
        ("qwen3-moe", ("all-linear",), in_layers(*ATTENTION)),  # neither routers nor the experts' fused matrices
        ("qwen3", ("q_proj", "mlp.up_proj"), in_layers("self_attn.q_proj", "mlp.up_proj")),
        ("qwen3", ("q_proj", "all-linear"), in_layers(*ATTENTION, *MLP)),
        ("qwen3", ("layers.1.mlp.up_proj", "v_proj"), {"model.layers.1.mlp.up_proj"} | in_layers("self_attn.v_proj")),
        ("qwen3", ("model.layers.0.self_attn.o_proj",), {"model.layers.0.self_attn.o_proj"}),
    ],
)
def test_targets_are_the_last_parts_of_names(kind: str, targets: tuple[str, ...], wanted: set[str]) -> None:
    assert targets_in(look_at(tiny_config(kind)), of(*targets)).keys() == wanted


def test_no_router_of_a_layer_that_has_several_gets_one_either() -> None:
    """Attention chooses experts too in a JetMoE, and what transformers tells of is all of the attention."""
    wanted = in_layers("self_attention.kv_proj")
    assert targets_in(look_at(smallest_config("jetmoe", num_hidden_layers=2)), of("all-linear")).keys() == wanted


def test_a_critics_value_head_gets_no_adapter_but_is_trained() -> None:
    model = look_at(tiny_config("qwen3"), value_head=True, lora=LORA)
    trained = trained_parameters(model)
    assert set(trained) - set(adapter_parameters(model)) == {"value_head.weight"}
    assert len(adapter_parameters(model)) == 2 * 2 * len([*ATTENTION, *MLP])


@pytest.mark.parametrize(
    ("kind", "target", "told"),
    [
        ("qwen3", "q_porj", "Qwen3ForCausalLM has no module 'q_porj', did you mean 'q_proj'? linear layers that can"),
        ("qwen3-moe", "experts", "'model.layers.0.mlp.experts' is of class Qwen3MoeExperts, wanted a linear layer; "),
        (
            "qwen3",
            "embed_tokens",
            "'model.embed_tokens' is of class Embedding, wanted a linear layer; name layers such",
        ),
        ("qwen3", "lm_head", "'lm_head' is the head, whose matrix is read in chunks; leave it out of the targets"),
    ],
)
def test_a_target_that_cannot_have_an_adapter_is_told(kind: str, target: str, told: str) -> None:
    with pytest.raises(ModelError) as caught:
        targets_in(look_at(tiny_config(kind)), of("q_proj", target))
    assert caught.value.message.startswith(told)


def test_a_model_without_linear_layers_to_adapt_is_refused() -> None:
    config = smallest_config("gpt2")  # whose layers are Conv1D
    with pytest.raises(ModelError) as caught:
        look_at(config, lora=LORA)
    assert caught.value.message == (
        "GPT2LMHeadModel has no linear layers that could have adapters; train all its weights"
    )


def with_adapters(kind: str, lora: LoraConfig) -> PreTrainedModel:
    """The drawn model of a kind, with adapters of random numbers."""
    drawn = drawn_model(tiny_config(kind))
    model = build_on_meta(tiny_config(kind), dtype=torch.float32, attention="eager")
    put_adapters(model, lora, dtype=torch.float32)
    torch.manual_seed(4)
    known = dict(drawn.named_parameters())
    materialize(
        model,
        {
            name: nn.Parameter(known[name].detach().clone() if name in known else 0.1 * torch.randn(param.shape))
            for name, param in model.named_parameters()
        },
    )
    freeze(model)
    return model.eval()


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen2"])  # the latter has biases
def test_the_output_is_that_of_the_weights_with_scale_b_a_added(kind: str) -> None:
    lora = evolve(LORA, rslora=True)
    assert lora.scale == 7.0 / math.sqrt(3) and LORA.scale == 7.0 / 3
    model, merged = with_adapters(kind, lora), drawn_model(tiny_config(kind))
    tokens = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = merged(tokens).logits
        for name, module in model.named_modules():
            if isinstance(module, LoraLinear):
                a, b = (each.weight.double() for each in (module.lora_A, module.lora_B))
                target = merged.get_parameter(f"{name}.weight")
                target.copy_(target.double() + 7.0 / math.sqrt(3) * b @ a)
        found, wanted = model(tokens).logits, merged(tokens).logits
    assert (wanted - before).abs().max() > 0.1
    assert (found - wanted).abs().max() < 1e-5


def test_all_parameters_but_adapters_are_frozen_and_get_no_gradient() -> None:
    model = with_adapters("qwen3-tied", of("v_proj"))
    assert model.lm_head.weight is model.get_input_embeddings().weight  # tied as before
    model(torch.arange(3, 9)[None]).logits.square().sum().backward()
    named = dict(model.named_parameters())
    wanted = {f"model.layers.{layer}.self_attn.v_proj.lora_{part}.weight" for layer in (0, 1) for part in "AB"}
    assert {name for name in named if named[name].requires_grad} == wanted == set(trained_parameters(model))
    assert {name for name in named if named[name].grad is not None} == wanted


def test_a_model_without_adapters_trains_all_its_parameters() -> None:
    model = drawn_model(tiny_config("qwen3"))
    freeze(model)
    assert trained_parameters(model) == dict(model.named_parameters())
    assert all(param.requires_grad for param in model.parameters())


def test_adapters_have_the_names_that_peft_gives_them_beside_the_weights() -> None:
    shapes = shapes_of(look_at(tiny_config("qwen3"), lora=of("up_proj")))
    up = f"{PREFIX}model.layers.1.mlp.up_proj"
    assert {name: shape for name, shape in shapes.items() if is_adapter(name) and ".1." in name} == {
        f"{up}.lora_A.weight": (3, 64),
        f"{up}.lora_B.weight": (96, 3),
    }
    assert {name: shape for name, shape in shapes.items() if not is_adapter(name)} == shapes_of(
        look_at(tiny_config("qwen3"))
    )


def test_adapters_of_renamed_weights_have_the_names_of_their_modules_in_peft() -> None:
    model = look_at(smallest_config("laguna"), lora=LORA)  # whose shared experts are called otherwise in its files
    ours = f"{PREFIX}model.layers.1.mlp.shared_expert.gate_proj.lora_B.weight"
    assert peft_names(model)[ours] == f"{PREFIX}model.layers.1.mlp.shared_experts.gate_proj.lora_B.weight"
    adapters = {name: shape for name, shape in shapes_of(model).items() if is_adapter(name)}
    assert peft_names(model).keys() == adapters.keys()
    for name, shape in adapters.items():  # of A [rank, in] and B [out, rank]
        assert shapes_of(model)[adapted(name)][not name.endswith(B)] == shape[not name.endswith(B)]
    same = look_at(tiny_config("qwen3"), lora=LORA)
    assert all(ours == theirs for ours, theirs in peft_names(same).items())


def test_a_weight_that_is_split_in_the_files_cannot_have_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    def split(model: PreTrainedModel, params: dict[str, Tensor]) -> dict[str, Tensor]:
        up = params.pop("model.layers.0.mlp.up_proj.weight")
        return {**params, "up.0": up[:48], "up.1": up[48:]}

    monkeypatch.setattr(names, "revert_weight_conversion", split)
    with pytest.raises(ModelError) as caught:
        shapes_of(look_at(tiny_config("qwen3"), lora=LORA))
    assert caught.value.message == (
        "Qwen3ForCausalLM has no tensor 'model.layers.0.mlp.up_proj.weight' of its own in its files, so that it cannot "
        "have an adapter; leave it out of lora.targets"
    )
    assert any(map(is_adapter, shapes_of(look_at(tiny_config("qwen3"), lora=of("self_attn.q_proj")))))
