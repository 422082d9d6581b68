"""What is said, or refused, of a model's experts and of the fields that only transformers' own training reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from transformers import PreTrainedConfig

from corerl.config.schema import Config, LoraConfig
from corerl.errors import Unsupported
from corerl.models.files import look_at
from corerl.plan.experts import against_aux_loss, unread_fields, without_adapters
from corerl.plan.group import plan_group
from corerl.plugin.capabilities import Capability, check_capabilities
from corerl.plugin.spec import BackendSpec
from corerl_testing import smallest_config
from corerl_testing.models import tiny_config, tiny_fields
from corerl_testing.plain.spec import SPEC
from tests.driver.saved import config_in
from tests.pictures import pictures_config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_in(tmp_path / "run")


def balancing(config: Config, coef: float = 0.25) -> Config:
    return evolve(config, train=evolve(config.train, aux_loss_coef=coef))


def router_loss(model_type: str, **fields: Any) -> PreTrainedConfig:
    return smallest_config(model_type, output_router_logits=True, **fields)


@pytest.mark.parametrize(
    ("model_type", "name", "fields"),
    [
        ("qwen3_moe", "router_aux_loss_coef", {"router_aux_loss_coef": 0.125}),
        ("dbrx", "moe_loss_weight", {"ffn_config": {"moe_loss_weight": 0.125}}),
    ],
)
def test_a_coefficient_that_only_transformers_reads_is_said(
    config: Config, model_type: str, name: str, fields: dict[str, Any]
) -> None:
    hf = router_loss(model_type, **fields)
    line = (
        f"model.config: {name}=0.125 changes transformers' loss, not CoreRL's; set train.aux_loss_coef=0.125 to have it"
    )
    assert unread_fields(config, {"actor": hf}) == [line]
    assert unread_fields(balancing(config), {"actor": hf}) == []


@pytest.mark.parametrize(
    "hf",
    [
        smallest_config("qwen3_moe", router_aux_loss_coef=0.125),
        router_loss("qwen3_moe", router_aux_loss_coef=0.0),
        router_loss("llama4_text", router_aux_loss_coef=0.125),  # which transformers' loss of it leaves out
        smallest_config("gpt2"),  # has dropout by default
    ],
)
def test_a_coefficient_that_nobody_reads_is_not_said(config: Config, hf: PreTrainedConfig) -> None:
    assert unread_fields(config, {"actor": hf}) == []


def test_other_terms_noise_and_further_layers_are_said(config: Config) -> None:
    (line,) = unread_fields(config, {"actor": smallest_config("bamba", z_loss_coefficient=0.5)})
    assert line.startswith("model.config: z_loss_coefficient=0.5 changes transformers' loss, not CoreRL's, which has")
    (line,) = unread_fields(config, {"actor": smallest_config("mixtral", router_jitter_noise=0.25)})
    assert line.startswith("model.config: router_jitter_noise=0.25: trained without this noise here")
    hf = smallest_config("glm4_moe", num_nextn_predict_layers=1)
    assert unread_fields(config, {"actor": hf}) == []  # from random weights nobody misses any
    stored = evolve(config, model=evolve(config.model, path="models/glm", config={}))
    (line,) = unread_fields(stored, {"actor": hf})
    assert line.startswith("model.path: config.json: num_nextn_predict_layers=1: layers that predict further tokens")


def test_parts_that_are_not_trained_have_no_line_of_their_own(config: Config) -> None:
    stored = evolve(config, model=evolve(config.model, path="models/pictures", config={}))
    hf = pictures_config("qwen3_5")
    hf.get_text_config().mtp_num_hidden_layers = 1  # an export has these layers, and the tower
    hf.projector_dropout = 0.125
    hf.architectures = ["Qwen3_5ForCausalLM"]
    (line,) = unread_fields(stored, {"actor": hf})
    assert "mtp_num_hidden_layers=1" in line
    hf.architectures = ["Qwen3_5ForConditionalGeneration"]
    assert unread_fields(stored, {"actor": hf}) == []


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("qwen3", "but the actor's model has no experts"),
        ("glm4_moe", "but transformers has no such loss for Glm4MoeForCausalLM"),
        ("jetmoe", "but it is not known which modules of JetMoeForCausalLM route"),
    ],
)
def test_models_that_cannot_be_balanced_are_refused(config: Config, model_type: str, said: str) -> None:
    built = {"actor": look_at(smallest_config(model_type))}
    assert list(against_aux_loss(balancing(config), built)) == [f"train.aux_loss_coef: 0.25, {said}; set it to 0"]
    assert list(against_aux_loss(config, built)) == []


def test_a_step_whose_tokens_are_not_known_is_refused(config: Config) -> None:
    built, asked = {"actor": look_at(tiny_config("qwen3-moe"))}, balancing(config)
    assert list(against_aux_loss(asked, built)) == []
    streamed = evolve(asked, rollout=evolve(asked.rollout, source="streamed"))
    (line,) = against_aux_loss(streamed, built)
    assert "weighs tokens by how many the step has" in line and line.endswith("or rollout.source to 'synchronous'")


def test_a_backend_that_does_not_know_the_loss_is_refused() -> None:
    old = BackendSpec(implementation=SPEC.implementation, config=SPEC.config, api=SPEC.api, summary="")
    needs = {Capability.AUX_LOSS: "train.aux_loss_coef = 0.25"}
    with pytest.raises(Unsupported, match="0.25 requires 'aux-loss', which the backend 'old' .* does not declare it"):
        check_capabilities(old, needs, name="old")
    check_capabilities(SPEC, needs, name="plain")


def test_experts_without_adapters_are_said_with_their_share(tmp_path: Path, config: Config) -> None:
    lora = LoraConfig().settled({"rank": 2, "targets": ("q_proj", "v_proj")})
    hf = tiny_config("qwen3-moe")
    weights = {name: param.numel() for name, param in look_at(hf).named_parameters()}
    covered = sum(numel for name, numel in weights.items() if "q_proj" in name or "v_proj" in name)
    assert without_adapters(evolve(config, lora=lora), {"actor": hf}) == [
        (
            f"lora: adapters cover {100 * covered / sum(weights.values()):.2g} % of the weights: 4 fused tensors of "
            "experts (gate_up_proj, down_proj) get none"
        )
    ]
    assert without_adapters(evolve(config, lora=lora), {"actor": tiny_config("qwen3")}) == []
    assert without_adapters(config, {"actor": hf}) == []


def test_a_group_alone_is_told_the_same(config: Config) -> None:
    fields = {**tiny_fields("qwen3-moe"), "output_router_logits": True}
    asked = evolve(config, model=evolve(config.model, config=fields), lora=LoraConfig())
    notices = plan_group(asked, "actor", resume="").notices
    assert sum("changes transformers' loss" in line or "get none" in line for line in notices) == 2
